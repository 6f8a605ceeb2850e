// The wire format: whole frames, and the cutting of a byte stream into frames.
//
// PROTOCOL.md is the specification. As strict as the server's own codec: whatever is not exactly
// what the schema says is a FrameError, which names the field and the offset in the frame of the
// first byte at fault.

import { FrameError, typeOf, viewOf, within } from "./bare.js";
import { SCHEMA_ID, TAGS } from "./schema.js";

export { FrameError, TailraceError, fromHex, toHex, typeOf } from "./bare.js";
export { SCHEMA_ID, TAGS };

/** @typedef {import("./schema.js").Frame} Frame */
/** @typedef {import("./schema.js").FrameType} FrameType */

export const VERSION = 1;
/** Header, tag and corr. */
export const PREFIX_BYTES = 9;
export const MAX_FRAME_BYTES = 1 << 20;
const HEADER_BYTES = 4;
const LEAST_LENGTH = PREFIX_BYTES - HEADER_BYTES;
const FLAG_ZSTD = 1;
const OUT_BYTES = 256;

/** Each frame's name by its tag. @type {FrameType[]} */
const NAMES = [];
for (const [name, tag] of Object.entries(TAGS)) NAMES[tag] = /** @type {FrameType} */ (name);
const ALL_TAGS = new Set(Object.values(TAGS));

/** The length that a header word declares, after checking all that it says.
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
  if (flags & ~FLAG_ZSTD) throw new FrameError(`unknown flags ${flags}`, "header.flags", 3);
  if (length < LEAST_LENGTH) {
    throw new FrameError(`length ${length} cannot hold a tag and a corr`, "header.length", 0);
  }
  if (length > most) {
    throw new FrameError(`length ${length} exceeds the limit of ${most}`, "header.length", 0);
  }
  return length;
}

/** @param {number} tag @param {ReadonlySet<number>} tags */
function checkTag(tag, tags) {
  if (tags.has(tag)) return;
  const fault = ALL_TAGS.has(tag) ? `tag ${tag} is not this side's to send` : `unknown tag ${tag}`;
  throw new FrameError(fault, "tag", HEADER_BYTES);
}

/** @param {Uint8Array} raw */
function prefixOf(raw) {
  if (raw.length < PREFIX_BYTES) {
    throw new FrameError(`frame ends after ${raw.length} bytes, before its payload`, "header", 0);
  }
  return viewOf(raw);
}

/** The tag of a whole frame. @param {Uint8Array} raw */
export const tagOf = (raw) => prefixOf(raw).getUint8(HEADER_BYTES);

/** The corr of a whole frame. @param {Uint8Array} raw */
export const corrOf = (raw) => prefixOf(raw).getUint32(HEADER_BYTES + 1, true);

/** A copy of a whole frame, under another corr. @param {Uint8Array} raw @param {number} corr */
export function withCorr(raw, corr) {
  const copy = raw.slice();
  prefixOf(copy).setUint32(HEADER_BYTES + 1, checkedCorr(corr), true);
  return copy;
}

/** @param {number} corr */
function checkedCorr(corr) {
  if (corr >>> 0 === corr) return corr;
  throw new FrameError(`${corr} is not a u32`, "corr", HEADER_BYTES + 1);
}

/** One whole frame.
 * @param {Frame} frame
 * @param {number} [corr]
 * @param {number} [maxFrameBytes]
 */
export function encode(frame, corr = 0, maxFrameBytes = MAX_FRAME_BYTES) {
  const tag = TAGS[frame.type];
  if (typeof tag !== "number") throw new FrameError(`${frame.type} is no frame`, String(frame.type), 0);
  const bytes = new Uint8Array(OUT_BYTES);
  const out = { size: PREFIX_BYTES, bytes, view: viewOf(bytes) };
  within(frame.type, () => typeOf(frame.type).encode(out, frame));
  const length = out.size - HEADER_BYTES;
  if (length > Math.min(maxFrameBytes, 0xffffff)) {
    throw new FrameError(`length ${length} exceeds the limit of ${maxFrameBytes}`, "header.length", 0);
  }
  out.view.setUint32(0, (VERSION << 24) | length, true);
  out.view.setUint8(HEADER_BYTES, tag);
  out.view.setUint32(HEADER_BYTES + 1, checkedCorr(corr), true);
  return out.bytes.slice(0, out.size);
}

/** What exactly one whole frame holds. Throws FrameError and nothing else, whatever the bytes.
 * @param {Uint8Array} raw
 * @param {number} [maxFrameBytes]
 * @returns {{corr: number, frame: Frame}}
 */
export function decode(raw, maxFrameBytes = MAX_FRAME_BYTES) {
  if (raw.length < HEADER_BYTES) prefixOf(raw);
  const view = viewOf(raw);
  const header = view.getUint32(0, true);
  const length = lengthOf(header, maxFrameBytes);
  if (raw.length - HEADER_BYTES !== length) {
    const have = raw.length - HEADER_BYTES;
    const kind = have < length ? "truncated frame" : "bytes after the frame";
    throw new FrameError(`${kind}: length ${length}, ${have} bytes follow`, "header.length", 0);
  }
  const tag = tagOf(raw);
  checkTag(tag, ALL_TAGS);
  if (header >>> 28) throw new FrameError("compressed frame, and no zstd here", "header.flags", 3);
  const type = /** @type {FrameType} */ (NAMES[tag]);
  const source = { bytes: raw, view, at: PREFIX_BYTES };
  const values = within(type, () => typeOf(type).decode(source));
  if (source.at !== raw.length) {
    throw new FrameError(`${raw.length - source.at} bytes too many`, type, source.at);
  }
  return { corr: corrOf(raw), frame: { type, ...values } };
}

/**
 * Fed bytes in any pieces, gives whole frames, undecoded; holds at most one unfinished frame.
 *
 * Version, flags, length and tag are checked as soon as they are there. After a FrameError the
 * stream has lost its place: every later feed throws the same one.
 */
export class Splitter {
  /** @type {Uint8Array[]} */
  #rest = [];
  #needed = HEADER_BYTES; // bytes of `#rest` before there is anything to look at
  /** @type {unknown} */
  #error = null;

  /** @param {{tags?: ReadonlySet<number>, maxFrameBytes?: number}} [limits] */
  constructor({ tags = ALL_TAGS, maxFrameBytes = MAX_FRAME_BYTES } = {}) {
    this.tags = tags;
    this.maxFrameBytes = maxFrameBytes;
    /** Bytes of an unfinished frame. */
    this.pending = 0;
  }

  /** The frames that `data` completes. @param {Uint8Array} data @returns {Uint8Array[]} */
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
    if (this.#rest.length === 1) return /** @type {Uint8Array} */ (this.#rest[0]);
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

  /** The whole frames, and where the unfinished one begins.
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
      checkTag(/** @type {number} */ (data[start + HEADER_BYTES]), this.tags);
      this.#needed = end - start;
      if (data.length < end) break;
      frames.push(data.slice(start, end));
      start = end;
      this.#needed = HEADER_BYTES;
    }
    return [frames, start];
  }
}
