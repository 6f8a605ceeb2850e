// Durable token streams for browsers, Node.js and Workers. docs/web.md shows how to use it.

import { system } from "./connection.js";
import { Stream, keyOf, partsOf } from "./stream.js";

export { TailraceError } from "./errors.js";
export { Stream } from "./stream.js";

/** @typedef {import("./stream.js").Options} Options */

/** Read a stream: a new one of `input`, or the one that the URL names. Reading begins at once.
 * @param {string} url /v1/generate of an edge, or /v1/generate/ID
 * @param {Options} [options]
 */
export const stream = (url, options = {}) => new Stream(url, options, options.system ?? system, null);

/** Read the stream again that the page was reading before a reload, from its beginning. Return null if
 * there is none.
 * @param {string} url as it was given to `stream`
 * @param {Options & {storage: import("./stream.js").Store}} options
 * @returns {Stream | null}
 */
export function resume(url, options) {
  const saved = JSON.parse(options.storage.getItem(keyOf(options, partsOf(url)[0])) ?? "null");
  return saved && new Stream(url, options, options.system ?? system, saved);
}
