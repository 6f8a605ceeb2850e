// The errors of this package.

/** The base class of all errors of this package. `code` names the error; `retryable` is true if a
 * retry may succeed.
 */
export class TailraceError extends Error {
  /**
   * @param {string} message
   * @param {{code?: string, status?: number, retryable?: boolean, field?: string | null,
   *   hint?: string | null, retryAfterMs?: number | null, cause?: unknown}} [about]
   */
  constructor(message, about = {}) {
    super(message, about.cause ? { cause: about.cause } : {});
    this.name = "TailraceError";
    this.code = about.code ?? "internal";
    this.status = about.status ?? 0;
    this.retryable = about.retryable ?? false;
    this.field = about.field ?? null;
    this.hint = about.hint ?? null;
    this.retryAfterMs = about.retryAfterMs ?? null;
  }
}

/** Bytes that are not a valid frame, or values that cannot be encoded as one. */
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

/** Return the retryable error of a broken connection.
 * @param {string} code
 * @param {string} message
 * @param {unknown} [cause]
 */
export const broken = (code, message, cause) =>
  new TailraceError(message, { code, status: 503, retryable: true, cause });

/** Return the error of an edge that did not answer. If the edge has another web origin than the page,
 * browsers hide whether CORS is the reason, so a hint names the setting for it.
 * @param {string | URL} url of the edge
 * @param {string} message
 * @param {unknown} [cause]
 */
export function unreachable(url, message, cause) {
  const page = globalThis.location;
  const error = broken("edge_unreachable", message, cause);
  if (page && new URL(url).host !== page.host) {
    error.hint = `if the edge is up, ${page.origin} has to be in its edge.allowed_origins`;
  }
  return error;
}

/** Return the error that a StreamError frame reports. @param {import("./schema.js").StreamError}
 * frame
 */
export const errorOf = (frame) =>
  new TailraceError(frame.message, { ...frame, retryAfterMs: frame.retry_after_ms });
