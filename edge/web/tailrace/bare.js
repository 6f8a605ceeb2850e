// The BARE types (draft-devault-bare) of the schema. Each is parsed once from the table in schema.js.
//
// That table has the types that a client needs to read streams; encode.js adds the others.
//
// Values in JavaScript: an integer above 2^53-1 is a bigint, an enum is its word, a stream id is a
// string of 32 hex digits, other data is a Uint8Array. An absent optional is null, and may be left out
// of a value to encode.

import { FrameError } from "./errors.js";
import { TYPES } from "./schema.js";

/**
 * @typedef {object} Type
 * @property {string} kind a primitive's name, or optional, list, fixed, hex, enum or struct
 * @property {number} least the minimum number of bytes of a value
 * @property {Type} [of] the type inside an optional or a list
 * @property {number} [most] the maximum number of items of a list
 * @property {string[]} [words] the words of an enum
 * @property {{name: string, of: Type}[]} [columns] the fields of a struct
 */

export const U64_MAX = 2n ** 64n - 1n;
const LEAST = { uint: 1, bool: 1, str: 1, data: 1, u16: 2, u32: 4, u64: 8, f32: 4, f64: 8 };

/** @type {Map<string, Type>} */
const types = new Map(Object.entries(LEAST).map(([kind, least]) => [kind, { kind, least }]));

/** Return a type by its spelling in the schema. @param {string} spelled @returns {Type} */
export function typeOf(spelled) {
  let type = types.get(spelled);
  if (!type) types.set(spelled, (type = made(spelled)));
  return type;
}

/** @param {string} spelled @returns {Type} */
function made(spelled) {
  const [, kind = "", of = "", most] = spelled.match(/^(optional|list|data)[<[](.+)[>\]](?:<=(\d+))?$/) ?? [];
  if (kind === "data") return { kind: "fixed", least: Number(of) };
  if (kind) return { kind, least: 1, of: typeOf(of), most: Number(most ?? Infinity) };
  const said = TYPES[spelled] ?? "";
  const parts = said.match(/\S+/g) ?? [];
  if (said.startsWith("data[")) return { ...typeOf(said), kind: "hex" };
  if (!/^\d|:/.test(said)) return { kind: "enum", least: 1, words: parts };
  const columns = parts
    .filter((part) => part.includes(":"))
    .map((part) => {
      const [name = "", of = ""] = part.split(":");
      return { name, of: typeOf(of) };
    });
  return { kind: "struct", columns, least: columns.reduce((sum, { of }) => sum + of.least, 0) };
}

/** Return the error of a value. The structs around it add the path to its `field`.
 * @param {string} message
 * @param {number} offset
 */
export const fault = (message, offset) => new FrameError(message, "", offset);

/** Add `path` in front of the field of an error. @param {string} path @param {unknown} error */
export function within(path, error) {
  if (error instanceof FrameError) error.field = path + error.field;
  return error;
}

/** @param {Uint8Array} bytes */
export const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** @param {Uint8Array} bytes */
export const toHex = (bytes) =>
  Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
