/** Checks which web pages may use this edge, and makes the CORS headers, as edge/access/page_origins.py.
 */

import { callerError } from "./errors";

const ANY = "*";
const PREFLIGHT_AGE_S = 600;
const METHODS = "GET, HEAD, PUT, POST, DELETE, OPTIONS";
const ALLOWED_HEADERS = [
  ...["Authorization", "Content-Type", "If-None-Match", "Last-Event-ID"],
  ...["Idempotency-Key", "Tailrace-Token", "Traceparent", "X-Request-Id"],
  ...["Stream-Seq", "Stream-TTL", "Stream-Expires-At", "Stream-Closed"],
  ...["Stream-Forked-From", "Stream-Fork-Offset", "Stream-Fork-Sub-Offset"],
  ...["Producer-Id", "Producer-Epoch", "Producer-Seq"],
  "*", // allows any header except Authorization, which has to be listed by name
].join(", ");
const EXPOSED_HEADERS = [
  ...["Tailrace-Stream", "Tailrace-Token", "Tailrace-Siblings", "Tailrace-Ignored"],
  "Tailrace-Schema",
  ...["Stream-Next-Offset", "Stream-Cursor", "Stream-Up-To-Date", "Stream-Closed"],
  ...["Stream-TTL", "Stream-Expires-At", "Stream-SSE-Data-Encoding"],
  ...["Producer-Epoch", "Producer-Seq", "Producer-Expected-Seq", "Producer-Received-Seq"],
  ...["ETag", "Location", "Retry-After", "Content-Encoding", "Vary"],
  ...["X-Request-Id", "Request-Id", "Retry-After-Ms", "X-Should-Retry"],
  ...["RateLimit", "RateLimit-Policy"],
  ...["X-RateLimit-Limit-Requests", "X-RateLimit-Remaining-Requests"],
  ...["X-RateLimit-Reset-Requests", "X-RateLimit-Limit-Tokens"],
  ...["X-RateLimit-Remaining-Tokens", "X-RateLimit-Reset-Tokens"],
].join(", ");

/** Throw if the request comes from a page that may not use this edge.
 *
 * Programs other than browsers send no Origin header, so they are allowed.
 */
export function checkPage(request: Request, allowed: string[]): void {
  const origin = request.headers.get("Origin");
  if (origin === null || allowed.includes(ANY) || allowed.includes(origin)) return;
  const separator = origin.indexOf("://");
  if (separator >= 0 && bare(origin.slice(separator + 3)) === bare(hostOf(request))) return;
  throw callerError("pages of this origin may not use this edge", {
    code: "foreign_origin",
    status: 403,
    field: "Origin",
    hint: "the edge's operator can name it in edge.allowed_origins",
  });
}

function hostOf(request: Request): string {
  return request.headers.get("Host") ?? new URL(request.url).host;
}

/** Return a host in lower case, without the default port of HTTP or HTTPS. */
function bare(authority: string): string {
  return authority.toLowerCase().replace(/:(80|443)$/, "");
}

/** Return the headers that tell browsers which pages may read an answer, also that of an error. */
export function accessHeaders(request: Request, allowed: string[]): Record<string, string> {
  if (allowed.length === 0) return { "Cross-Origin-Resource-Policy": "same-origin" };
  const headers: Record<string, string> = { "Cross-Origin-Resource-Policy": "cross-origin" };
  const origin = request.headers.get("Origin");
  if (allowed.includes(ANY)) {
    headers["Access-Control-Allow-Origin"] = ANY;
  } else {
    headers["Vary"] = "Origin"; // so that caches do not use an answer for another origin
    if (origin === null || !allowed.includes(origin)) return headers;
    headers["Access-Control-Allow-Origin"] = origin;
  }
  headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS;
  return headers;
}

/** Return the answer to OPTIONS. It allows nothing if the page's origin is not allowed. */
export function preflight(access: Record<string, string>): Response {
  const headers = new Headers({ "X-Content-Type-Options": "nosniff" });
  if ("Access-Control-Allow-Origin" in access) {
    headers.set("Access-Control-Allow-Methods", METHODS);
    headers.set("Access-Control-Allow-Headers", ALLOWED_HEADERS);
    headers.set("Access-Control-Max-Age", String(PREFLIGHT_AGE_S));
  }
  return new Response(null, { status: 204, headers });
}
