// Reads a stream as the body of an HTTP response, over HTTP/3 if the browser supports it.

import { Splitter, decode } from "./decode.js";
import { FrameError, TailraceError, broken, unreachable } from "./errors.js";
import { SCHEMA_ID } from "./schema.js";

/** @typedef {import("./connection.js").Connect} Connect */

const FRAMES = "application/vnd.tailrace.frames";
/** Minimum speed of an upload, 16 KB/s. A slower one counts as a lost connection. */
const SLOWEST_BYTES_PER_MS = 16;
/** Statuses that are retryable if the answer does not say whether it is, for example a proxy's. */
const PASSING = [408, 425, 429, 500, 502, 503, 504];

/** @type {Connect} */
export function byFetch(asked, system, report) {
  const abort = new AbortController();
  const { signal } = abort;
  const [url, init] = requestOf(asked, signal);
  const read = async () => {
    const response = await system.fetch(url, init);
    if (response.status === 204) return report.ended();
    const { headers, body } = response;
    if (!response.ok) throw await httpError(response);
    if (!headers.get("Content-Type")?.startsWith(FRAMES) || !body) {
      throw broken("not_frames", "the answer is not an edge's");
    }
    const schema = headers.get("Tailrace-Schema") ?? SCHEMA_ID; // a proxy may have dropped it
    if (schema !== SCHEMA_ID) {
      throw new TailraceError(`schema ${schema}, not ${SCHEMA_ID}`, { code: "schema_mismatch", status: 426 });
    }
    report.opened({
      id: headers.get("Tailrace-Stream"),
      token: headers.get("Tailrace-Token"),
      siblings: siblingsIn(headers.get("Tailrace-Siblings") ?? ""),
    });
    const splitter = new Splitter();
    const reader = body.getReader();
    for (;;) {
      await report.room();
      const { value, done } = await reader.read();
      if (done) throw broken("cut_short", "the body ended too early");
      for (const raw of splitter.feed(value)) report.frame(decode(raw).frame, raw.length);
      report.alive();
    }
  };
  read().catch((error) => signal.aborted || report.lost(asTailraceError(error, url)));
  const uploadMs = String(init.body ?? "").length / SLOWEST_BYTES_PER_MS;
  return { uploadMs, allow() {}, close: () => abort.abort() };
}

/** @param {import("./connection.js").Asked} asked @param {AbortSignal} signal
 * @returns {[string, RequestInit]}
 */
function requestOf(asked, signal) {
  const { url, openUrl, id, input, idempotencyKey, token, nextIndex, snapshot, group, tail, since, headers } = asked;
  const init = { signal, cache: /** @type {const} */ ("no-store") };
  const accept = { ...headers, Accept: FRAMES };
  if (id) {
    const after = nextIndex ? nextIndex - 1 : undefined;
    /** @type {import("./schema.js").GroupBody} */
    const { by, ms, chars } = typeof group === "string" ? { by: group } : (group ?? {});
    const given = { snapshot: snapshot ? 1 : null, after, tail, since, group: by, group_ms: ms, group_chars: chars };
    // The replacer drops what is null or undefined.
    const query = new URLSearchParams(JSON.parse(JSON.stringify(given, (_, value) => value ?? undefined)));
    return [`${url}/${id}?${query}`, { ...init, headers: { ...accept, ...tokenHeader(token) } }];
  }
  const more = { "Content-Type": "application/json", "Idempotency-Key": idempotencyKey };
  const body = JSON.stringify({ ...input, group });
  return [openUrl, { ...init, method: "POST", headers: { ...accept, ...more, ...tokenHeader(token) }, body }];
}

/** @param {string | null} token @returns {Record<string, string>} */
export const tokenHeader = (token) => (token ? { "Tailrace-Token": token } : {});

/** @param {string} header */
const siblingsIn = (header) =>
  header
    .split(",")
    .filter((part) => part.trim())
    .map((part) => {
      const [stream = "", token = ""] = part.trim().split(";token=");
      return { stream, token };
    });

/** Return the error of an HTTP response, which a proxy may have written.
 * @param {Response} response
 */
export async function httpError(response) {
  const { status } = response;
  const said = await response.text().catch(() => "");
  const isText = response.headers.get("Content-Type")?.startsWith("text/plain") && said;
  const error = parsed(said)?.error ?? (isText ? { message: said } : {});
  const after = response.headers.get("Retry-After") ?? "";
  return new TailraceError(error.message ?? `the answer was HTTP status ${status}`, {
    code: error.code ?? "http_error",
    status,
    retryable: error.retryable ?? PASSING.includes(status),
    field: error.field,
    hint: error.hint,
    retryAfterMs: /^\d+$/.test(after) ? 1000 * Number(after) : null,
  });
}

/** Parse JSON. Return null if the text is not JSON. @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Return a TailraceError for whatever `fetch` or the body threw.
 * @param {unknown} error
 * @param {string} url
 */
export function asTailraceError(error, url) {
  if (error instanceof FrameError) return broken(error.code, `a broken body: ${error.message}`, error);
  if (error instanceof TailraceError) return error;
  return unreachable(url, String(error), error);
}
