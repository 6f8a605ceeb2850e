/** `/v1/generate` between edges: how a stream is begun, and what is said of one that is open. */

import { decode, encode } from "../../edge/web/tailrace/wire.js";
import type { Opened } from "../../edge/web/tailrace/schema.js";
import { TailraceError } from "./errors";
import { Origin } from "./origin";
import type { Env } from "./settings";

export const START = "/v1/generate";
/** The origin's Opened; to an object from the Worker, which has just opened the stream. */
export const OPENED = "Tailrace-Opened";

/** What the origin said: its whole Opened frame is in a header. */
export function openedOf(headers: Headers): Opened {
  const { frame } = decode(fromBase64(headers.get(OPENED) ?? ""));
  if (frame.type !== "Opened") throw new TailraceError(`${frame.type} where Opened is awaited`);
  return frame;
}

export function headerOf(opened: Opened): string {
  return toBase64(encode(opened));
}

/** Of the answer to a reader. */
export function headersOf(opened: Opened): Headers {
  const headers = new Headers({
    "Cache-Control": "no-store, no-transform",
    Incremental: "?1", // draft-ietf-httpbis-incremental
    "Referrer-Policy": "no-referrer", // the URL may have a token
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
    "Tailrace-Stream": opened.stream,
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

/** A key of our own lets a request be sent again when the origin's edge is lost. */
export function randomKey(): string {
  return crypto.randomUUID().replaceAll("-", "");
}

/** The answer to a new stream's request, which has an idempotency key. */
export async function begin(
  env: Env,
  headers: Headers,
  body: Uint8Array | string,
): Promise<Response> {
  const origin = new Origin(env.TAILRACE_ORIGIN_URL);
  return origin.ask(origin.url(START), { method: "POST", headers, body });
}

export function objectOf(env: Env, id: string): DurableObjectStub {
  return env.STREAMS.getByName(id);
}

/** The object's own address of a stream: only its path and query mean anything. */
export function addressOf(id: string, next: number): string {
  return `https://stream${START}/${id}${next > 0 ? `?after=${next - 1}` : ""}`;
}

function toBase64(bytes: Uint8Array): string {
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}
