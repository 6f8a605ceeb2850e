// Begins a stream that shares the first frames of another one. It is a module of its own, so that
// pages without branches do not load it.

/** @typedef {import("./stream.js").Options} Options */
/** A stream that can be branched: one of the client, or its id and resume token.
 * @typedef {{id: string | null, token?: string | null}} Parent
 */
/** Settings of the new stream. `index` is the number of frames that it shares. `text` follows them as
 * if the model had written it, `instruction` as the user's next message.
 * @typedef {{index: number, text?: string, instruction?: string} & Record<string, any>} BranchInput
 */

/** Return the options with which `stream(url, options)` begins a branch of `parent`.
 * @param {string} url the URL of streams, such as /v1/generate
 * @param {Parent} parent
 * @param {BranchInput} input
 * @param {Options} [options]
 * @returns {Options}
 */
export function branch(url, { id, token }, input, options = {}) {
  const { href } = new URL(url, globalThis.location?.href);
  const openUrl = `${href.replace(/\/$/, "")}/${id}/branch`;
  return { ...options, input: /** @type {any} */ (input), openUrl, openToken: token };
}

/** Return the options with which `stream(url, options)` generates an answer again, from its beginning
 * and with a new seed.
 * @param {string} url
 * @param {Parent} parent
 * @param {Options} [options]
 */
export const regenerate = (url, parent, options) => branch(url, parent, { index: 0 }, options);
