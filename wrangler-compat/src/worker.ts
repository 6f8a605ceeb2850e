/** The routes of this edge, which are those of edge/application.py.
 *
 * A stream's Durable Object (its object) serves events and frames of the stream, but not to readers
 * that ask for `tail`, `since`, `snapshot` or `group`. These and all other requests are forwarded to
 * the Tailrace edge behind this Worker (the edge behind).
 */

import { SCHEMA_ID } from "../../edge/web/tailrace/wire.js";
import { version } from "../package.json";
import { accessHeaders, checkPage, preflight } from "./access";
import {
  TailraceError,
  callerError,
  errorResponse,
  messagesErrorResponse,
  openaiErrorResponse,
  speaksMessages,
  speaksOpenai,
} from "./errors";
import {
  OPENED,
  START,
  addressOf,
  begin,
  headerOf,
  objectOf,
  openedOf,
  randomKey,
} from "./generation";
import { Origin, forwarded } from "./origin";
import { FRAMES, JSON_VIEW, checkHeaders, chooseView, checkStreamId, parseAfter } from "./request";
import { type Env, allowedOrigins, maxBodyBytes } from "./settings";

export { StreamObject } from "./stream_object";

const READ = /^\/v1\/generate\/([^/]+)$/;
const CANCEL = /^\/v1\/generate\/[^/]+\/cancel$/;
/** Parameters of readers that the edge behind serves. */
const FORWARDED = ["tail", "since", "snapshot", "group", "group_ms", "group_chars"];
const REQUEST_ID = "X-Request-Id";
const ID = /^[!-~]{1,128}$/;
/** Prefixes of the paths that answer a CORS preflight. */
const PREFLIGHTS = [
  ...["/v1/generate", "/api/chat", "/v1/stream/", "/v1/chat/completions", "/v1/completions"],
  ...["/v1/responses", "/v1/embeddings", "/v1/models", "/v1/messages", "/v1/chats/"],
];

export default {
  async fetch(asked: Request, env: Env): Promise<Response> {
    const request = new Request(asked);
    const id = requestId(asked);
    request.headers.set(REQUEST_ID, id); // so that the edge behind logs the same id
    const allowed = allowedOrigins(env);
    const access = accessHeaders(request, allowed);
    let answer: Response;
    try {
      checkHeaders(request);
      checkPage(request, allowed);
      answer = await route(request, env, access);
    } catch (error) {
      if (!(error instanceof TailraceError)) console.error(error);
      const fault =
        error instanceof TailraceError
          ? error
          : new TailraceError("internal error of this edge; the edge's log has the details", {
              status: 500,
            });
      const { pathname } = new URL(request.url);
      if (speaksOpenai(pathname)) answer = openaiErrorResponse(fault);
      else if (speaksMessages(pathname)) answer = messagesErrorResponse(fault, id);
      else answer = errorResponse(fault);
    }
    if (answer.webSocket) return answer;
    const headers = new Headers(answer.headers);
    headers.set(REQUEST_ID, id);
    for (const [name, value] of Object.entries(access)) {
      if (name === "Vary") headers.append(name, value);
      else headers.set(name, value);
    }
    return new Response(answer.body, { status: answer.status, headers });
  },
};

async function route(
  request: Request,
  env: Env,
  access: Record<string, string>,
): Promise<Response> {
  const url = new URL(request.url);
  const { pathname } = url;
  if (request.method === "OPTIONS" && PREFLIGHTS.some((path) => pathname.startsWith(path))) {
    return preflight(access);
  }
  if (request.method === "GET" && pathname === "/healthz") return document({ ok: true });
  if (request.method === "GET" && pathname === "/version") {
    return document({ tailrace: version, schema: SCHEMA_ID });
  }
  if (request.method === "POST" && pathname === START) return start(request, env);
  const [, id] = READ.exec(decoded(pathname)) ?? [];
  if (request.method === "GET" && id !== undefined) return read(request, env, id);
  return pass(request, env);
}

/** Decode a path. An encoded slash counts as a slash, as in the edge behind. */
function decoded(pathname: string): string {
  try {
    return decodeURIComponent(pathname);
  } catch {
    return pathname;
  }
}

/** Return the request's id if it has a valid one, else a new id. */
function requestId(request: Request): string {
  const given = request.headers.get(REQUEST_ID) ?? "";
  return ID.test(given) ? given : randomKey();
}

function document(fields: object): Response {
  return Response.json(fields, { headers: { "Cache-Control": "no-store" } });
}

/** POST /v1/generate: start a stream at the edge behind and read it through its object. */
async function start(request: Request, env: Env): Promise<Response> {
  const view = chooseView(request.headers.get("Accept"));
  const headers = forwarded(request);
  headers.set("Accept", view === JSON_VIEW ? JSON_VIEW : FRAMES);
  if (!headers.has("Idempotency-Key")) headers.set("Idempotency-Key", randomKey());
  const body = await bodyOf(request, maxBodyBytes(env));
  // The object does not group text, so the edge behind does, and its answer is relayed as it comes.
  const isGrouped = view !== JSON_VIEW && isJson(headers) && hasGroup(body);
  if (isGrouped) headers.set("Accept", view);
  const answer = await begin(env, headers, body);
  if (view === JSON_VIEW || isGrouped || answer.status !== 200) return answer;
  // The object itself reads the stream from the edge behind, so that reading does not end with this
  // request.
  await answer.body?.cancel();
  const opened = openedOf(answer.headers);
  const asked = new Headers(request.headers);
  asked.set(OPENED, headerOf(opened));
  asked.delete("Last-Event-ID");
  asked.delete("Tailrace-Token");
  return objectOf(env, opened.stream).fetch(addressOf(opened.stream, 0), {
    headers: asked,
    signal: request.signal,
  });
}

/** Return false for a body that is an Open frame. */
function isJson(headers: Headers): boolean {
  return headers.get("Content-Type") !== FRAMES;
}

/** Return true if the field `group` of a JSON body is set. */
function hasGroup(body: Uint8Array): boolean {
  const text = new TextDecoder().decode(body);
  if (!text.includes('"group"')) return false; // nearly all bodies, which need not be parsed
  try {
    const fields = JSON.parse(text) as { group?: unknown } | null;
    return (fields?.group ?? null) !== null;
  } catch {
    return false; // the edge behind refuses it
  }
}

/** GET /v1/generate/{id}: read a stream through its object, or at the edge behind. */
async function read(request: Request, env: Env, id: string): Promise<Response> {
  const view = chooseView(request.headers.get("Accept"));
  const query = new URL(request.url).searchParams;
  checkStreamId(id);
  parseAfter(query.getAll("after"), request.headers.get("Last-Event-ID"));
  // The object stores neither times, nor snapshots, nor groups of frames.
  const isForwarded = FORWARDED.some((name) => query.has(name));
  if (view === JSON_VIEW || isForwarded) return pass(request, env);
  const asked = new Request(request);
  asked.headers.delete(OPENED); // objects trust this header, so clients must not be able to set it
  return objectOf(env, id).fetch(asked);
}

/** Forward a request to the edge behind and return its answer.
 *
 * The answer to a WebSocket handshake has the WebSocket of that edge. The runtime then relays the
 * messages in both directions, and no code of this Worker runs while the connection is open. The
 * request keeps its API key, so the edge behind decides who may connect.
 */
async function pass(request: Request, env: Env): Promise<Response> {
  const origin = new Origin(env.TAILRACE_ORIGIN_URL);
  const { pathname, search } = new URL(request.url);
  const url = origin.url(pathname + search);
  const init = { method: request.method, headers: forwarded(request) };
  if (request.method === "GET" || request.method === "HEAD") return origin.ask(url, init);
  const body = await bodyOf(request, maxBodyBytes(env));
  const again = CANCEL.test(pathname); // a cancellation can be repeated without harm
  return again ? origin.ask(url, { ...init, body }) : origin.askOnce(url, { ...init, body });
}

/** Read a request's body. Throws if it is larger than `limitBytes`. */
async function bodyOf(request: Request, limitBytes: number): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let size = 0;
  for await (const piece of request.body ?? []) {
    size += piece.length;
    if (size > limitBytes) {
      throw callerError("the request body is too large", {
        code: "too_large",
        status: 413,
        hint: `at most ${limitBytes} bytes`,
      });
    }
    pieces.push(piece);
  }
  return new Uint8Array(await new Blob(pieces).arrayBuffer());
}
