// Decodes payloads and whole frames, and cuts a byte stream into frames.
//
// It is as strict as the server's codec. Bytes that do not match the schema exactly are a FrameError,
// which has the field and the offset of the first wrong byte in the frame.

import { U64_MAX, fault, toHex, typeOf, viewOf, within } from "./bare.js";
import { FrameError } from "./errors.js";
import { TYPES } from "./schema.js";

/** @typedef {import("./bare.js").Type} Type */
/** @typedef {import("./schema.js").Frame} Frame */
/** @typedef {{bytes: Uint8Array, view: DataView, at: number}} Source */

export const VERSION = 1;
export const HEADER_BYTES = 4;
/** Header, tag and corr. */
export const PREFIX_BYTES = 9;
export const MAX_FRAME_BYTES = 1 << 20;
const FLAG_ZSTD = 1;

/** The names of frames by tag. @type {Map<number, string>} */
export const names = new Map();

/** Add the frames of these types. @param {Record<string, string>} types */
export function know(types) {
  Object.assign(TYPES, types);
  for (const [name, said] of Object.entries(types)) {
    const tag = parseInt(said);
    if (tag >= 0) names.set(tag, name);
  }
}

know(TYPES);
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

// ---- values ----

/** @param {Type} type @param {Source} source @returns {any} */
export function decodeValue(type, source) {
  const { bytes, view, at: start } = source;
  switch (type.kind) {
    case "uint":
      return decodeUint(source);
    case "str":
      try {
        return utf8.decode(sized(source));
      } catch (error) {
        throw error instanceof FrameError ? error : fault("text is not valid UTF-8", start);
      }
    case "data":
      return sized(source).slice();
    case "optional":
      return decodeBool(source) ? decodeValue(/** @type {Type} */ (type.of), source) : null;
    case "list":
      return decodeList(type, source);
    case "enum": {
      const number = decodeUint(source);
      const word = /** @type {string[]} */ (type.words)[number];
      if (word === undefined) throw fault(`${number} is none of ${type.words}`, start);
      return word;
    }
    case "struct":
      return decodeStruct(type, source, {});
    case "bool":
      return decodeBool(source);
  }
  source.at += type.least;
  if (source.at > bytes.length) throw fault(`truncated: ${type.least} bytes are due`, start);
  switch (type.kind) {
    case "u16":
      return view.getUint16(start, true);
    case "u32":
      return view.getUint32(start, true);
    case "u64":
      return narrow(view.getBigUint64(start, true));
    case "f32":
      return view.getFloat32(start, true);
    case "f64":
      return view.getFloat64(start, true);
    case "hex":
      return toHex(bytes.subarray(start, source.at));
  }
  return bytes.slice(start, source.at);
}

/** @param {bigint} value @returns {any} */
const narrow = (value) => (value <= Number.MAX_SAFE_INTEGER ? Number(value) : value);

/** Decode a number, or a bigint if a number would not be exact. @param {Source} source @returns
 * {any}
 */
function decodeUint(source) {
  const start = source.at;
  let value = 0;
  let high = 0n; // the high bits, since a number holds only 53
  for (let nth = 0; nth < 10; nth++) {
    const byte = source.bytes[source.at++];
    if (byte === undefined) throw fault("truncated varint", start);
    if (nth < 7) value += (byte & 127) * 2 ** (7 * nth);
    else high |= BigInt(byte & 127) << BigInt(7 * nth);
    if (byte < 128) {
      if (nth && !byte) throw fault("varint is not in its shortest form", start);
      const whole = high && high | BigInt(value);
      if (whole > U64_MAX) break;
      return high ? narrow(whole) : value;
    }
  }
  throw fault("varint exceeds 64 bits", start);
}

/** @param {Source} source */
function decodeBool(source) {
  const byte = source.bytes[source.at];
  if (byte === undefined) throw fault("truncated bool", source.at);
  if (byte > 1) throw fault(`byte 0x${byte.toString(16).padStart(2, "0")} is neither 0 nor 1`, source.at);
  source.at++;
  return byte === 1;
}

/** Return a view of the bytes after a length. @param {Source} source */
function sized(source) {
  const start = source.at;
  const size = decodeUint(source);
  const left = source.bytes.length - source.at;
  if (size > left) throw fault(`length ${size} exceeds the ${left} bytes left`, start);
  source.at += size;
  return source.bytes.subarray(source.at - size, source.at);
}

/** @param {Type} type @param {Source} source */
function decodeList(type, source) {
  const of = /** @type {Type} */ (type.of);
  const start = source.at;
  const count = Number(decodeUint(source));
  const left = source.bytes.length - source.at;
  // Checked before any item is made, so that a count cannot cost memory or time.
  if (count > /** @type {number} */ (type.most)) throw fault(`${count} items, of ${type.most} at most`, start);
  if (count * of.least > left) throw fault(`${count} items cannot fit in ${left} bytes`, start);
  const items = [];
  for (let nth = 0; nth < count; nth++) {
    try {
      items.push(decodeValue(of, source));
    } catch (error) {
      throw within(`[${nth}]`, error);
    }
  }
  return items;
}

/** @param {Type} type @param {Source} source @param {Record<string, any>} values */
function decodeStruct(type, source, values) {
  for (const { name, of } of type.columns ?? []) {
    try {
      values[name] = decodeValue(of, source);
    } catch (error) {
      throw within(`.${name}`, error);
    }
  }
  return values;
}

// ---- frames ----

/** Check a header word and return the length in it.
 * @param {number} header
 * @param {number} most
 */
function lengthOf(header, most) {
  const version = (header >>> 24) & 15;
  const flags = header >>> 28;
  const length = header & 0xffffff;
  if (version !== VERSION) {
    throw new FrameError(`frame version ${version} is not supported`, "header.version", 3, "bad_version");
  }
  if (flags & ~FLAG_ZSTD) throw new FrameError(`unknown flags 0x${flags.toString(16)}`, "header.flags", 3);
  const isShort = length < PREFIX_BYTES - HEADER_BYTES;
  if (isShort || length > most) {
    const why = isShort ? "cannot hold a tag and a corr" : `exceeds the limit of ${most}`;
    throw new FrameError(`length ${length} ${why}`, "header.length", 0);
  }
  return length;
}

/** @param {number} tag @param {{has: (tag: number) => boolean}} tags */
function checkTag(tag, tags) {
  if (tags.has(tag)) return;
  const said = names.has(tag) ? `tag ${tag} is not this side's to send` : `unknown tag ${tag}`;
  throw new FrameError(said, "tag", HEADER_BYTES);
}

/** @param {Uint8Array} raw */
export function prefixOf(raw) {
  if (raw.length < PREFIX_BYTES) {
    throw new FrameError(`frame ends after ${raw.length} bytes, before its payload`, "header", 0);
  }
  return viewOf(raw);
}

/** Decode exactly one whole frame. Throws only FrameError, for any bytes.
 * @param {Uint8Array} raw
 * @param {number} [maxFrameBytes]
 * @returns {{corr: number, frame: Frame}}
 */
export function decode(raw, maxFrameBytes = MAX_FRAME_BYTES) {
  if (raw.length < HEADER_BYTES) prefixOf(raw);
  const view = viewOf(raw);
  const header = view.getUint32(0, true);
  const length = lengthOf(header, maxFrameBytes);
  const have = raw.length - HEADER_BYTES;
  if (have !== length) {
    throw new FrameError(`length ${length}, and ${have} bytes follow`, "header.length", 0);
  }
  const tag = view.getUint8(HEADER_BYTES);
  checkTag(tag, names);
  if (header >>> 28) throw new FrameError("compressed frame, and this side has no zstd", "header.flags", 3);
  const type = names.get(tag) ?? "";
  const source = { bytes: raw, view, at: PREFIX_BYTES };
  /** @type {any} */
  const frame = { type };
  try {
    decodeStruct(typeOf(type), source, frame);
  } catch (error) {
    throw within(type, error);
  }
  const rest = raw.length - source.at;
  if (rest) throw new FrameError(`${rest} bytes too many`, type, source.at);
  return { corr: view.getUint32(HEADER_BYTES + 1, true), frame };
}

/** Takes bytes in chunks of any size and returns whole frames, not decoded. Holds at most one
 * unfinished frame.
 *
 * Version, flags, length and tag are checked as soon as they arrive. After a FrameError the
 * position in the stream is lost, so every later feed throws the same error.
 */
export class Splitter {
  /** @type {Uint8Array[]} */
  #rest = [];
  #needed = HEADER_BYTES; // bytes of `#rest` before the next check is possible
  /** @type {unknown} */
  #error = null;

  /** @param {{tags?: ReadonlySet<number>, maxFrameBytes?: number}} [limits] */
  constructor({ tags, maxFrameBytes = MAX_FRAME_BYTES } = {}) {
    this.tags = tags ?? names;
    this.maxFrameBytes = maxFrameBytes;
    /** The number of bytes of an unfinished frame. */
    this.pending = 0;
  }

  /** Return the frames that `data` completes. @param {Uint8Array} data @returns {Uint8Array[]} */
  feed(data) {
    if (this.#error) throw this.#error;
    this.#rest.push(data);
    this.pending += data.length;
    if (this.pending < this.#needed) return [];
    const whole = this.#joined();
    try {
      const [frames, end] = this.#cut(whole);
      this.#keep(whole.slice(end));
      return frames;
    } catch (error) {
      this.#error = error;
      this.#keep(new Uint8Array());
      throw error;
    }
  }

  #joined() {
    const [only = new Uint8Array(), ...more] = this.#rest;
    if (!more.length) return only;
    const whole = new Uint8Array(this.pending);
    let end = 0;
    for (const piece of this.#rest) {
      whole.set(piece, end);
      end += piece.length;
    }
    return whole;
  }

  /** @param {Uint8Array} bytes */
  #keep(bytes) {
    this.#rest = bytes.length ? [bytes] : [];
    this.pending = bytes.length;
  }

  /** Return the whole frames, and the offset of the unfinished one.
   * @param {Uint8Array} data
   * @returns {[Uint8Array[], number]}
   */
  #cut(data) {
    const frames = [];
    const view = viewOf(data);
    let start = 0;
    this.#needed = HEADER_BYTES;
    while (data.length - start >= HEADER_BYTES) {
      const end = start + HEADER_BYTES + lengthOf(view.getUint32(start, true), this.maxFrameBytes);
      this.#needed = HEADER_BYTES + 1;
      if (data.length - start <= HEADER_BYTES) break;
      checkTag(view.getUint8(start + HEADER_BYTES), this.tags);
      this.#needed = end - start;
      if (data.length < end) break;
      frames.push(data.slice(start, end));
      start = end;
      this.#needed = HEADER_BYTES;
    }
    return [frames, start];
  }
}
