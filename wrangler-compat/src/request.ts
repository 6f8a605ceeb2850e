/** Checks and parses a request's URL and headers, as edge/generate/params.py does. */

import { callerError } from "./errors";

export type View =
  | "text/event-stream"
  | "application/vnd.tailrace.frames"
  | "application/x-ndjson"
  | "application/jsonl"
  | "application/json";
export const SSE: View = "text/event-stream";
export const FRAMES: View = "application/vnd.tailrace.frames";
export const NDJSON: View = "application/x-ndjson";
export const JSONL: View = "application/jsonl";
export const JSON_VIEW: View = "application/json";

const VIEWS = new Map<string, View>([
  ["text/event-stream", SSE],
  ["text/*", SSE],
  [FRAMES, FRAMES],
  ["application/octet-stream", FRAMES],
  [NDJSON, NDJSON],
  [JSONL, JSONL],
  ["application/json", JSON_VIEW],
  ["application/*", JSON_VIEW],
  ["*/*", JSON_VIEW],
]);
const STREAM_ID = /^[0-9a-f]{32}$/;
const NUMBER = /^[0-9]{1,20}$/;
const U64_MAX = 2n ** 64n - 1n;

/** Maximum bytes and number of headers of a request, as in edge/server/http1.py. */
const MAX_HEAD_BYTES = 16 << 10;
const MAX_HEADERS = 100;

export function checkHeaders(request: Request): void {
  const fields = [...request.headers];
  const size = fields.reduce((sum, [name, value]) => sum + name.length + value.length + 4, 0);
  if (size + request.url.length <= MAX_HEAD_BYTES && fields.length <= MAX_HEADERS) return;
  throw callerError("the request's headers are too large", {
    code: "headers_too_large",
    status: 431,
  });
}

/** Return the view that an Accept header prefers (RFC 9110, 12.5.1), or JSON without one. */
export function chooseView(accept: string | null): View {
  if (accept === null || !accept.trim()) return JSON_VIEW;
  let best: { quality: number; wildcards: number; view: View } | undefined;
  for (const range of accept.split(",")) {
    const [name = "", ...parameters] = range.trim().toLowerCase().split(";");
    const view = VIEWS.get(name.trim());
    const quality = qualityOf(parameters);
    // Of two media ranges with the same quality, prefer the one without a wildcard.
    const wildcards = name.split("*").length;
    const isBetter =
      best === undefined ||
      quality > best.quality ||
      (quality === best.quality && wildcards < best.wildcards);
    if (view !== undefined && quality > 0 && isBetter) best = { quality, wildcards, view };
  }
  if (best !== undefined) return best.view;
  throw callerError(`a stream cannot be shown as '${accept}'`, {
    code: "not_acceptable",
    status: 406,
    field: "Accept",
    hint: `one of ${[SSE, FRAMES, NDJSON, JSONL, JSON_VIEW].join(", ")}`,
  });
}

function qualityOf(parameters: string[]): number {
  for (const parameter of parameters) {
    const [name = "", value = ""] = parameter.split("=");
    if (name.trim() === "q") return Number(value.trim() || Number.NaN) || 0;
  }
  return 1;
}

/** Return the stream id in a path. Throws if it is not a valid id. */
export function checkStreamId(text: string): string {
  if (STREAM_ID.test(text)) return text;
  throw callerError("no such stream", {
    code: "unknown_stream",
    status: 404,
    field: "id",
    hint: "a stream id is 32 hex digits",
  });
}

/** Return the index of the first requested frame, from `?after=` and `Last-Event-ID`. */
export function parseAfter(after: string[], lastEventId: string | null): number {
  const given = new Set(after.map((text) => indexOf(text, "after")));
  // EventSource may send an empty Last-Event-ID, which means none.
  if (lastEventId) given.add(indexOf(lastEventId, "Last-Event-ID"));
  if (given.size > 1) {
    throw callerError("the request has two different indexes to resume after", {
      field: "after",
      hint: "send either ?after= or Last-Event-ID",
    });
  }
  for (const index of given) return Number(index) + 1;
  return 0;
}

function indexOf(text: string, field: string): bigint {
  const index = NUMBER.test(text) ? BigInt(text) : U64_MAX + 1n;
  if (index <= U64_MAX) return index;
  throw callerError("not the index of a frame", {
    field,
    hint: "send the index of the last frame you have, in decimal digits",
  });
}
