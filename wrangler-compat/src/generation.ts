/** Requests for `/v1/generate` to the edge behind and to objects, and the header with Opened. */

import { SCHEMA_ID, decode, encode } from "../../edge/web/tailrace/wire.js";
import type { Opened } from "../../edge/web/tailrace/schema.js";
import { TailraceError } from "./errors";
import { Origin } from "./origin";
import type { Env } from "./settings";

export const START = "/v1/generate";
/** Name of a header that holds a whole Opened frame. An answer in frames has it. So does the
 * request with which the Worker hands a stream that it has just opened to the stream's object. */
export const OPENED = "Tailrace-Opened";

/** Return the Opened frame in the headers. */
export function openedOf(headers: Headers): Opened {
  const { frame } = decode(fromBase64(headers.get(OPENED) ?? ""));
  if (frame.type !== "Opened") throw new TailraceError(`${frame.type} where Opened is awaited`);
  return frame;
}

/** Return an Opened frame as the value of its header. */
export function headerOf(opened: Opened): string {
  return toBase64(encode(opened));
}

/** Return the headers of the answer to a reader. */
export function headersOf(opened: Opened): Headers {
  const headers = new Headers({
    "Cache-Control": "no-store, no-transform",
    Incremental: "?1", // draft-ietf-httpbis-incremental
    "Referrer-Policy": "no-referrer", // the URL may contain a token
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
    "Tailrace-Stream": opened.stream,
    "Tailrace-Schema": SCHEMA_ID,
  });
  if (opened.token) headers.set("Tailrace-Token", opened.token);
  if (opened.siblings.length > 0) {
    const named = opened.siblings.map(({ stream, token }) =>
      token ? `${stream};token=${token}` : stream,
    );
    headers.set("Tailrace-Siblings", named.join(", "));
  }
  return headers;
}

/** Return an idempotency key, with which a request can be sent again if the edge behind is lost. */
export function randomKey(): string {
  return crypto.randomUUID().replaceAll("-", "");
}

/** Start a stream at the edge behind and return its answer. The request has an idempotency key. */
export async function begin(
  env: Env,
  headers: Headers,
  body: Uint8Array | string,
): Promise<Response> {
  const origin = new Origin(env.TAILRACE_ORIGIN_URL);
  return origin.ask(origin.url(START), { method: "POST", headers, body });
}

/** Return the object of a stream. */
export function objectOf(env: Env, id: string): DurableObjectStub {
  return env.STREAMS.getByName(id);
}

/** Return the URL with which the Worker requests a stream from its object. Any host would do. */
export function addressOf(id: string, next: number): string {
  return `https://stream${START}/${id}${next > 0 ? `?after=${next - 1}` : ""}`;
}

function toBase64(bytes: Uint8Array): string {
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}
