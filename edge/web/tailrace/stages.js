// Switches optional stages of a pipeline while a stream of it runs.

import { system as theSystem } from "./connection.js";
import { httpError } from "./fetch.js";
import { headersOf, partsOf, patiently } from "./stream.js";

/** @typedef {import("./stream.js").Options} StreamOptions */

/** Switch stages on or off, each at one of its next items. Return when the request is durable. Throws a
 * TailraceError if it is refused, or if no edge has answered for the patience of `backoff`.
 * @param {string} url the URL of streams, such as /v1/generate
 * @param {{id: string | null, token?: string | null}} target a stream that has begun, or its id and resume token
 * @param {Record<string, boolean>} stages such as { punctuate: false }
 * @param {Pick<StreamOptions, "apiKey" | "headers" | "backoff" | "system">} [options]
 * @returns {Promise<{id: string, state: string, next_index: number}>}
 */
export function switchStages(url, { id, token }, stages, options = {}) {
  const [base] = partsOf(url);
  const system = options.system ?? theSystem;
  const path = `${base}/${id}/stages`;
  const headers = { "Content-Type": "application/json", ...headersOf(options), ...(token ? { "Tailrace-Token": token } : {}) };
  const request = async () => {
    const response = await system.fetch(path, { method: "POST", headers, body: JSON.stringify({ stages }) });
    if (!response.ok) throw await httpError(response);
    return response.json();
  };
  return patiently(request, path, system, options.backoff);
}
