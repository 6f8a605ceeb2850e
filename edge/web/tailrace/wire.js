// The whole wire format of PROTOCOL.md, for pages, Node.js and Workers.

import { HEADER_BYTES, prefixOf } from "./decode.js";
import { checkedCorr } from "./encode.js";

export { toHex } from "./bare.js";
export { MAX_FRAME_BYTES, PREFIX_BYTES, Splitter, VERSION, decode } from "./decode.js";
export { TAGS, encode, fromHex } from "./encode.js";
export { FrameError, TailraceError } from "./errors.js";
export { SCHEMA_ID } from "./schema.js";
export { CLIENT, CLOSING, LOGGED } from "./schema_client.js";

/** Return the tag of a whole frame. @param {Uint8Array} raw */
export const tagOf = (raw) => prefixOf(raw).getUint8(HEADER_BYTES);

/** Return the corr of a whole frame. @param {Uint8Array} raw */
export const corrOf = (raw) => prefixOf(raw).getUint32(HEADER_BYTES + 1, true);

/** Return a copy of a whole frame with another corr. @param {Uint8Array} raw @param {number} corr
 */
export function withCorr(raw, corr) {
  const copy = raw.slice();
  prefixOf(copy).setUint32(HEADER_BYTES + 1, checkedCorr(corr), true);
  return copy;
}
