/** Errors, and the HTTP responses that every edge makes of them. */

import { FrameError, TailraceError } from "../../edge/web/tailrace/wire.js";

export { TailraceError };

type Details = NonNullable<ConstructorParameters<typeof TailraceError>[1]>;

const RETRY_AFTER_MS = 1_000;
/** The longest wait before a retry is 1 + SPREAD times the shortest one. */
const SPREAD = 4;

/** Return the error for an invalid request. */
export function callerError(message: string, details: Details): TailraceError {
  return new TailraceError(message, { code: "invalid_request", status: 400, ...details });
}

/** Return a random wait of at least `leastMs`, so that clients refused together do not retry
 * together.
 */
export function spreadMs(leastMs: number): number {
  return leastMs + Math.round(Math.random() * SPREAD * leastMs);
}

export function unreachable(message: string): TailraceError {
  return new TailraceError(message, {
    code: "origin_unreachable",
    status: 503,
    retryable: true,
    retryAfterMs: spreadMs(RETRY_AFTER_MS),
  });
}

/** Return the error to send to a client. A FrameError gets the same offset and hint as in the
 * Python codec.
 */
export function asReported(error: TailraceError): TailraceError {
  if (!(error instanceof FrameError)) return error;
  const { code, status, field } = error;
  const hint =
    code === "bad_version"
      ? "this side speaks version 1"
      : error.message.startsWith("compressed")
        ? "send frames without the zstd flag"
        : null;
  return new TailraceError(`${error.message} at byte ${error.offset}`, { code, status, field, hint });
}

/** Return the JSON document of an error, without its empty fields. */
export function errorBody(error: TailraceError): { error: Record<string, string | boolean> } {
  const fields: Record<string, string | boolean> = { code: error.code, message: error.message };
  if (error.field !== null) fields["field"] = error.field;
  if (error.hint !== null) fields["hint"] = error.hint;
  fields["retryable"] = error.retryable;
  return { error: fields };
}

/** Return the whole response, with Retry-After (RFC 9110, 10.2.3) if the error says when. */
export function errorResponse(error: TailraceError): Response {
  const headers = new Headers({
    "Cache-Control": "no-store",
    "Content-Type": "application/json",
    "X-Content-Type-Options": "nosniff",
  });
  if (error.retryAfterMs !== null) {
    headers.set("Retry-After", String(Math.ceil(error.retryAfterMs / 1000)));
  }
  return new Response(JSON.stringify(errorBody(error)), { status: error.status, headers });
}

const OPENAI_PATH =
  /^\/v1\/(?:chat\/completions|completions|responses|embeddings|models)(?:\/|$)/;

/** Return true if clients of this path expect errors in the shape of OpenAI's API. */
export function speaksOpenai(path: string): boolean {
  return OPENAI_PATH.test(path);
}

/** Return an error in the shape of OpenAI's API, as edge/errors.py does. */
export function openaiErrorResponse(error: TailraceError): Response {
  const { code, field, hint, message, retryable, retryAfterMs, status } = error;
  const headers = new Headers({
    "Cache-Control": "no-store",
    "Content-Type": "application/json",
    "X-Content-Type-Options": "nosniff",
    "X-Should-Retry": String(retryable),
  });
  if (retryAfterMs !== null) {
    headers.set("Retry-After-Ms", String(retryAfterMs));
    headers.set("Retry-After", String(Math.ceil(retryAfterMs / 1000)));
  }
  const fields = {
    message: hint === null ? message : `${message} (${hint})`,
    type: status >= 500 ? "server_error" : "invalid_request_error",
    param: field,
    code: code === "invalid_request" ? null : code,
  };
  return new Response(JSON.stringify({ error: fields }), { status, headers });
}

const MESSAGES_PATH = /^\/v1\/messages(?:\/|$)/;

/** Return true if clients of this path expect errors in the shape of Anthropic's API. */
export function speaksMessages(path: string): boolean {
  return MESSAGES_PATH.test(path);
}

/** Return an error in the shape of Anthropic's API, as edge/errors.py does, for a request's id. */
export function messagesErrorResponse(error: TailraceError, request: string): Response {
  const { field, hint, message, retryable, retryAfterMs, status } = error;
  const headers = new Headers({
    "Cache-Control": "no-store",
    "Content-Type": "application/json",
    "X-Content-Type-Options": "nosniff",
    "Request-Id": request,
    "X-Should-Retry": String(retryable),
  });
  if (retryAfterMs !== null) {
    headers.set("Retry-After-Ms", String(retryAfterMs));
    headers.set("Retry-After", String(Math.ceil(retryAfterMs / 1000)));
  }
  const kinds: Record<number, string> = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
  };
  const text = hint === null ? message : `${message} (${hint})`;
  const fields = {
    type: kinds[status] ?? (status >= 500 ? "api_error" : "invalid_request_error"),
    message: field === null ? text : `${field}: ${text}`,
  };
  const body = { type: "error", error: fields, request_id: request };
  return new Response(JSON.stringify(body), { status, headers });
}

/** Return the error that the edge behind reports in its answer. */
export async function errorOf(answer: Response): Promise<TailraceError> {
  const said = await answer.text();
  try {
    const { error } = JSON.parse(said) as { error: Details & { message: string } };
    const after = answer.headers.get("Retry-After");
    return new TailraceError(error.message, {
      ...error,
      status: answer.status,
      retryAfterMs: after === null ? null : Number(after) * 1000,
    });
  } catch {
    return new TailraceError(`the origin answered ${answer.status}, and not in our words`, {
      status: 500,
    });
  }
}
