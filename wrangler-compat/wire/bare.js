// BARE (draft-devault-bare): the types of the schema, compiled once from the table in schema.js.
//
// In JavaScript an integer above 2^53-1 is a bigint, an enum its word, a stream id 32 hex digits,
// other data a Uint8Array, an absent optional null (or left out, when it is encoded).

import { ALIASES, ENUMS, STRUCTS } from "./schema.js";

/** @typedef {Record<string, any>} Values */
/** @typedef {{size: number, view: DataView, bytes: Uint8Array}} Out */
/** @typedef {{bytes: Uint8Array, view: DataView, at: number}} In */
/** @typedef {{encode: (out: Out, value: any) => void, decode: (source: In) => any, least: number}} Type */

const U64_MAX = 2n ** 64n - 1n;
const SURROGATE = /[\ud800-\udfff]/u;

/** Whatever this package throws: `code` says what it is, `retryable` whether it may go by itself. */
export class TailraceError extends Error {
  /**
   * @param {string} message
   * @param {{code?: string, status?: number, retryable?: boolean, field?: string | null,
   *   hint?: string | null, retryAfterMs?: number | null, cause?: unknown}} [about]
   */
  constructor(message, about = {}) {
    super(message, "cause" in about ? { cause: about.cause } : undefined);
    this.name = "TailraceError";
    this.code = about.code ?? "internal";
    this.status = about.status ?? 0;
    this.retryable = about.retryable ?? false;
    this.field = about.field ?? null;
    this.hint = about.hint ?? null;
    this.retryAfterMs = about.retryAfterMs ?? null;
  }
}

/** Bytes that are no frame, or values that make none. */
export class FrameError extends TailraceError {
  /**
   * @param {string} message
   * @param {string} field
   * @param {number} offset
   * @param {string} [code]
   */
  constructor(message, field, offset, code = "bad_frame") {
    super(message, { code, status: code === "bad_frame" ? 400 : 426, field });
    this.name = "FrameError";
    this.offset = offset;
  }
}

/** @param {string} message @param {number} offset */
const fault = (message, offset) => new FrameError(message, "", offset);

/** Runs `what`, and puts `path` before the field of whatever it finds wrong.
 * @template T
 * @param {string} path
 * @param {() => T} what
 * @returns {T}
 */
export function within(path, what) {
  try {
    return what();
  } catch (error) {
    if (error instanceof FrameError) error.field = path + error.field;
    throw error;
  }
}

// ---- bytes ----

/** @param {Uint8Array} bytes */
export const toHex = (bytes) =>
  Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** @param {string} text */
export const fromHex = (text) =>
  Uint8Array.from(text.match(/../g) ?? [], (digits) => parseInt(digits, 16));

/** @param {Uint8Array} bytes */
export const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** Room for `count` more bytes, and where they begin. @param {Out} out @param {number} count */
function grow(out, count) {
  const start = out.size;
  out.size += count;
  if (out.size > out.bytes.length) {
    const larger = new Uint8Array(Math.max(out.size, 2 * out.bytes.length));
    larger.set(out.bytes);
    out.bytes = larger;
    out.view = viewOf(larger);
  }
  return start;
}

/** @param {Out} out @param {Uint8Array} bytes */
function put(out, bytes) {
  const start = grow(out, bytes.length);
  out.bytes.set(bytes, start);
}

/** @param {Out} out @param {number} byte */
function putByte(out, byte) {
  const start = grow(out, 1);
  out.bytes[start] = byte;
}

// ---- primitives ----

/** @param {bigint} value */
const narrow = (value) => (value <= Number.MAX_SAFE_INTEGER ? Number(value) : value);

/** @param {unknown} value @param {bigint} most @param {number} at */
function integer(value, most, at) {
  if (typeof value !== "bigint" && !Number.isSafeInteger(value)) {
    throw fault("expected an integer; above 2^53-1, a bigint", at);
  }
  const big = BigInt(/** @type {number | bigint} */ (value));
  if (big < 0n || big > most) throw fault(`integer out of range 0..${most}`, at);
  return big;
}

/** @type {Type} */
const UINT = {
  least: 1,
  encode(out, value) {
    let rest = integer(value, U64_MAX, out.size);
    for (; rest > 127n; rest >>= 7n) putByte(out, Number(rest & 127n) | 128);
    putByte(out, Number(rest));
  },
  decode(source) {
    const start = source.at;
    let value = 0;
    let high = 0n; // what does not fit into a number
    for (let nth = 0; nth < 10; nth++) {
      const byte = source.bytes[source.at++];
      if (byte === undefined) throw fault("truncated varint", start);
      if (nth < 7) value += (byte & 127) * 2 ** (7 * nth);
      else high |= BigInt(byte & 127) << BigInt(7 * nth);
      if (byte < 128) {
        if (nth && !byte) throw fault("varint is not in its shortest form", start);
        if (!high) return value;
        const whole = high | BigInt(value);
        if (whole > U64_MAX) break;
        return narrow(whole);
      }
    }
    throw fault("varint exceeds 64 bits", start);
  },
};

/** A number of so many bytes, little-endian.
 * @param {string} name
 * @param {number} size
 * @param {(view: DataView, at: number, value: any) => void} set
 * @param {(view: DataView, at: number) => number | bigint} get
 * @param {(value: any, at: number) => number | bigint} check
 * @returns {Type}
 */
const fixed = (name, size, set, get, check) => ({
  least: size,
  encode(out, value) {
    const checked = check(value, out.size);
    const start = grow(out, size);
    set(out.view, start, checked);
  },
  decode(source) {
    const start = source.at;
    source.at += size;
    if (source.at > source.bytes.length) throw fault(`truncated ${name}`, start);
    return get(source.view, start);
  },
});

/** @param {unknown} value @param {number} at */
function real(value, at) {
  if (typeof value !== "number") throw fault("expected a number", at);
  return value;
}

/** @param {unknown} value @param {number} at */
function single(value, at) {
  const number = real(value, at);
  if (Number.isFinite(number) && !Number.isFinite(Math.fround(number))) {
    throw fault(`${number} is not a f32`, at);
  }
  return number;
}

/** @type {Type} */
const BOOL = {
  least: 1,
  encode(out, value) {
    if (typeof value !== "boolean") throw fault("expected a boolean", out.size);
    putByte(out, Number(value));
  },
  decode(source) {
    const byte = source.bytes[source.at];
    if (byte === undefined) throw fault("truncated bool", source.at);
    if (byte > 1) throw fault(`byte ${byte} is neither 0 nor 1`, source.at);
    source.at++;
    return byte === 1;
  },
};

/** @type {Type} */
const DATA = {
  least: 1,
  encode(out, value) {
    if (!(value instanceof Uint8Array)) throw fault("expected a Uint8Array", out.size);
    UINT.encode(out, value.length);
    put(out, value);
  },
  decode(source) {
    const start = source.at;
    const size = UINT.decode(source);
    const left = source.bytes.length - source.at;
    if (size > left) throw fault(`length ${size} exceeds the ${left} bytes left`, start);
    source.at += size;
    return source.bytes.slice(source.at - size, source.at);
  },
};

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** @type {Type} */
const STR = {
  least: 1,
  encode(out, value) {
    if (typeof value !== "string") throw fault("expected a string", out.size);
    if (SURROGATE.test(value)) throw fault("text holds a lone surrogate", out.size);
    DATA.encode(out, encoder.encode(value));
  },
  decode(source) {
    const start = source.at;
    const data = DATA.decode(source);
    try {
      return decoder.decode(data);
    } catch {
      throw fault("text is not valid UTF-8", start);
    }
  },
};

// ---- types made of types ----

/** `data[size]`: no length before it. @param {number} size @returns {Type} */
const fixedData = (size) => ({
  least: size,
  encode(out, value) {
    if (!(value instanceof Uint8Array) || value.length !== size) {
      throw fault(`expected a Uint8Array of ${size} bytes`, out.size);
    }
    put(out, value);
  },
  decode(source) {
    const start = source.at;
    source.at += size;
    if (source.at > source.bytes.length) throw fault(`truncated data of ${size} bytes`, start);
    return source.bytes.slice(start, source.at);
  },
});

/** Fixed data that has a name of its own is shown as hex digits. @param {Type} of @returns {Type} */
const asHex = (of) => ({
  least: of.least,
  encode(out, value) {
    if (typeof value !== "string" || !/^([0-9a-f]{2})*$/.test(value)) {
      throw fault(`expected ${2 * of.least} lower-case hex digits`, out.size);
    }
    of.encode(out, fromHex(value));
  },
  decode: (source) => toHex(of.decode(source)),
});

/** @param {Type} of @returns {Type} */
const optional = (of) => ({
  least: 1,
  encode(out, value) {
    const present = value !== null && value !== undefined;
    BOOL.encode(out, present);
    if (present) of.encode(out, value);
  },
  decode: (source) => (BOOL.decode(source) ? of.decode(source) : null),
});

/** @param {Type} of @param {number} [most] @returns {Type} */
const listOf = (of, most = Infinity) => ({
  least: 1,
  encode(out, value) {
    if (!Array.isArray(value)) throw fault("expected an array", out.size);
    UINT.encode(out, value.length);
    value.forEach((item, nth) => within(`[${nth}]`, () => of.encode(out, item)));
  },
  decode(source) {
    const start = source.at;
    const count = Number(UINT.decode(source));
    const left = source.bytes.length - source.at;
    // Before any item is made, so that no count can ask for memory or for time.
    if (count > most) throw fault(`${count} items, of ${most} at most`, start);
    if (count * of.least > left) throw fault(`${count} items cannot fit in ${left} bytes`, start);
    const items = [];
    for (let nth = 0; nth < count; nth++) {
      items.push(within(`[${nth}]`, () => of.decode(source)));
    }
    return items;
  },
});

/** @param {string} name @param {string[]} words @returns {Type} */
const enumOf = (name, words) => ({
  least: 1,
  encode(out, value) {
    const number = words.indexOf(value);
    if (number < 0) throw fault(`expected one of ${words.join(", ")}`, out.size);
    UINT.encode(out, number);
  },
  decode(source) {
    const start = source.at;
    const number = UINT.decode(source);
    const word = words[number];
    if (word === undefined) throw fault(`${number} is not a ${name}`, start);
    return word;
  },
});

/** @param {string} spelled @returns {Type} */
function structOf(spelled) {
  const columns = (spelled.match(/\S+/g) ?? []).map((column) => {
    const [name, of] = /** @type {[string, string]} */ (column.split(":"));
    return { name, path: `.${name}`, of: typeOf(of) };
  });
  return {
    least: columns.reduce((sum, { of }) => sum + of.least, 0),
    encode(out, value) {
      if (typeof value !== "object" || value === null) throw fault("expected an object", out.size);
      for (const { name, path, of } of columns) within(path, () => of.encode(out, value[name]));
    },
    decode(source) {
      /** @type {Values} */
      const values = {};
      for (const { name, path, of } of columns) values[name] = within(path, () => of.decode(source));
      return values;
    },
  };
}

/** @type {Map<string, Type>} */
const types = new Map([
  ["uint", UINT],
  ["bool", BOOL],
  ["str", STR],
  ["data", DATA],
  [
    "u16",
    fixed("u16", 2, (v, at, n) => v.setUint16(at, n, true), (v, at) => v.getUint16(at, true),
      (value, at) => Number(integer(value, 0xffffn, at))),
  ],
  [
    "u32",
    fixed("u32", 4, (v, at, n) => v.setUint32(at, n, true), (v, at) => v.getUint32(at, true),
      (value, at) => Number(integer(value, 0xffffffffn, at))),
  ],
  [
    "u64",
    fixed("u64", 8, (v, at, n) => v.setBigUint64(at, n, true),
      (v, at) => narrow(v.getBigUint64(at, true)), (value, at) => integer(value, U64_MAX, at)),
  ],
  [
    "f32",
    fixed("f32", 4, (v, at, n) => v.setFloat32(at, n, true), (v, at) => v.getFloat32(at, true), single),
  ],
  [
    "f64",
    fixed("f64", 8, (v, at, n) => v.setFloat64(at, n, true), (v, at) => v.getFloat64(at, true), real),
  ],
]);

/** The codec of a type, by its spelling in the schema. @param {string} spelled @returns {Type} */
export function typeOf(spelled) {
  let type = types.get(spelled);
  if (type === undefined) {
    type = compiled(spelled);
    types.set(spelled, type);
  }
  return type;
}

/** @param {string} spelled @returns {Type} */
function compiled(spelled) {
  const [, made, of = "", most] = spelled.match(/^(optional|list|data)[<[](.+)[>\]](?:<=(\d+))?$/) ?? [];
  if (made === "optional") return optional(typeOf(of));
  if (made === "list") return listOf(typeOf(of), most ? Number(most) : undefined);
  if (made === "data") return fixedData(Number(of));
  if (spelled in ENUMS) return enumOf(spelled, /** @type {string} */ (ENUMS[spelled]).split(" "));
  if (spelled in ALIASES) return asHex(typeOf(/** @type {string} */ (ALIASES[spelled])));
  return structOf(/** @type {string} */ (STRUCTS[spelled]));
}
