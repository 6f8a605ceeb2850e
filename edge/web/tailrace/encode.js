// Encodes frames. Values that do not have their types are a FrameError.

import { U64_MAX, fault, typeOf, viewOf, within } from "./bare.js";
import { HEADER_BYTES, MAX_FRAME_BYTES, PREFIX_BYTES, VERSION, know, names } from "./decode.js";
import { FrameError } from "./errors.js";
import { TYPES } from "./schema_client.js";

/** @typedef {import("./bare.js").Type} Type */
/** @typedef {{bytes: Uint8Array<ArrayBuffer>, view: DataView, size: number}} Sink */

know(TYPES);
/** The tags of frames by name.
 * @type {Readonly<Record<import("./schema.js").FrameType, number>>}
 */
export const TAGS = /** @type {any} */ (Object.fromEntries([...names].map(([tag, name]) => [name, tag])));
const FIRST_BYTES = 256;
const SURROGATE = /[\ud800-\udfff]/u;
const utf8 = new TextEncoder();

/** @param {string} text */
export const fromHex = (text) =>
  Uint8Array.from(text.match(/../g) ?? [], (digits) => parseInt(digits, 16));

/** Return an empty sink. @returns {Sink} */
export function emptySink() {
  const bytes = new Uint8Array(FIRST_BYTES);
  return { bytes, view: viewOf(bytes), size: 0 };
}

/** Make room for `count` more bytes and return their offset. @param {Sink} sink @param {number}
 * count
 */
function grow(sink, count) {
  const start = sink.size;
  sink.size += count;
  if (sink.size > sink.bytes.length) {
    const larger = new Uint8Array(Math.max(sink.size, 2 * sink.bytes.length));
    larger.set(sink.bytes);
    sink.bytes = larger;
    sink.view = viewOf(larger);
  }
  return start;
}

/** @param {Sink} sink @param {Uint8Array} bytes */
function put(sink, bytes) {
  const start = grow(sink, bytes.length);
  sink.bytes.set(bytes, start);
}

/** @param {unknown} value @param {bigint} most @param {number} at */
function integer(value, most, at) {
  if (typeof value !== "bigint" && !Number.isSafeInteger(value)) {
    throw fault("expected an integer; above 2^53-1, a bigint", at);
  }
  const big = BigInt(/** @type {number | bigint} */ (value));
  if (big < 0n || big > most) throw fault(`integer out of range 0..${most}`, at);
  return big;
}

/** @param {Sink} sink @param {unknown} value */
function encodeUint(sink, value) {
  let rest = integer(value, U64_MAX, sink.size);
  for (; rest > 127n; rest >>= 7n) {
    const at = grow(sink, 1); // before `sink.view` is read, since growing replaces it
    sink.view.setUint8(at, Number(rest & 127n) | 128);
  }
  const start = grow(sink, 1);
  sink.view.setUint8(start, Number(rest));
}

/** @param {Sink} sink @param {unknown} value @param {boolean} isRight @param {string} what */
function expect(sink, value, isRight, what) {
  if (!isRight) throw fault(`expected ${what}, got ${typeof value}`, sink.size);
}

/** @param {Type} type @param {Sink} sink @param {any} value @returns {void} */
export function encodeValue(type, sink, value) {
  const { kind, least } = type;
  const of = /** @type {Type} */ (type.of);
  switch (kind) {
    case "uint":
      return encodeUint(sink, value);
    case "bool":
      expect(sink, value, typeof value === "boolean", "a boolean");
      return put(sink, Uint8Array.of(Number(value)));
    case "str": {
      expect(sink, value, typeof value === "string", "text");
      expect(sink, value, !SURROGATE.test(value), "text without lone surrogates");
      const bytes = utf8.encode(value);
      encodeUint(sink, bytes.length);
      return put(sink, bytes);
    }
    case "data":
      expect(sink, value, value instanceof Uint8Array, "a Uint8Array");
      encodeUint(sink, value.length);
      return put(sink, value);
    case "fixed":
      expect(sink, value, value instanceof Uint8Array && value.length === least, `${least} bytes`);
      return put(sink, value);
    case "hex": {
      const isRight = typeof value === "string" && /^[0-9a-f]*$/.test(value) && value.length === 2 * least;
      expect(sink, value, isRight, `${2 * least} lower-case hex digits`);
      return put(sink, fromHex(value));
    }
    case "optional": {
      const isThere = value !== null && value !== undefined;
      put(sink, Uint8Array.of(Number(isThere)));
      return isThere ? encodeValue(of, sink, value) : undefined;
    }
    case "list":
      expect(sink, value, Array.isArray(value), "an array");
      encodeUint(sink, value.length);
      for (const [nth, item] of value.entries()) encodeIn(`[${nth}]`, of, sink, item);
      return;
    case "enum": {
      const words = type.words ?? [];
      expect(sink, value, words.includes(value), `one of ${words.join(", ")}`);
      return encodeUint(sink, words.indexOf(value));
    }
    case "struct":
      expect(sink, value, typeof value === "object" && value !== null, "an object");
      for (const { name, of } of type.columns ?? []) encodeIn(`.${name}`, of, sink, value[name]);
      return;
  }
  encodeNumber(kind, sink, value, least);
}

/** @param {string} kind @param {Sink} sink @param {any} value @param {number} size */
function encodeNumber(kind, sink, value, size) {
  const at = sink.size;
  const isReal = kind[0] === "f";
  if (isReal) {
    expect(sink, value, typeof value === "number", "a number");
    const fits = kind === "f64" || !Number.isFinite(value) || Number.isFinite(Math.fround(value));
    expect(sink, value, fits, "a number that fits in 32 bits");
  }
  const checked = isReal ? value : integer(value, 2n ** BigInt(8 * size) - 1n, at);
  grow(sink, size);
  const { view } = sink;
  if (kind === "f32") view.setFloat32(at, checked, true);
  else if (kind === "f64") view.setFloat64(at, checked, true);
  else if (kind === "u64") view.setBigUint64(at, checked, true);
  else if (kind === "u32") view.setUint32(at, Number(checked), true);
  else view.setUint16(at, Number(checked), true);
}

/** @param {string} path @param {Type} type @param {Sink} sink @param {unknown} value */
function encodeIn(path, type, sink, value) {
  try {
    encodeValue(type, sink, value);
  } catch (error) {
    throw within(path, error);
  }
}

/** @param {number} corr */
export function checkedCorr(corr) {
  if (corr >>> 0 === corr) return corr;
  throw new FrameError(`${corr} is not a u32`, "corr", HEADER_BYTES + 1);
}

/** Encode one whole frame.
 * @param {import("./schema.js").Frame} frame
 * @param {number} [corr]
 * @param {number} [maxFrameBytes]
 */
export function encode(frame, corr = 0, maxFrameBytes = MAX_FRAME_BYTES) {
  const { type } = frame;
  if (!Object.hasOwn(TAGS, type)) throw new FrameError(`${type} is no frame`, String(type), 0);
  const sink = emptySink();
  sink.size = PREFIX_BYTES;
  encodeIn(type, typeOf(type), sink, frame);
  const length = sink.size - HEADER_BYTES;
  if (length > Math.min(maxFrameBytes, 0xffffff)) {
    throw new FrameError(`length ${length} exceeds the limit of ${maxFrameBytes}`, "header.length", 0);
  }
  sink.view.setUint32(0, (VERSION << 24) | length, true);
  sink.view.setUint8(HEADER_BYTES, TAGS[type]);
  sink.view.setUint32(HEADER_BYTES + 1, checkedCorr(corr), true);
  return sink.bytes.slice(0, sink.size);
}
