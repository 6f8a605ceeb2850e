/** One WebSocket: the session's rules, and the streams that it reads of their objects.
 *
 * A session without an open stream sleeps: the runtime keeps its socket, and of the session what
 * the socket's attachment says.
 */

import { DurableObject } from "cloudflare:workers";

import { CLOSING, LOGGED, TAGS, encode } from "../../edge/web/tailrace/wire.js";
import type { Cancel, Frame, Open, Resume, Steer } from "../../edge/web/tailrace/schema.js";
import { version } from "../package.json";
import { TailraceError, errorOf, unreachable } from "./errors";
import { HEADER_BYTES, sizeAt } from "./frames";
import {
  OPENED,
  START,
  UP_TO_NOW,
  addressOf,
  begin,
  headerOf,
  objectOf,
  openedOf,
  randomKey,
} from "./generation";
import { Origin } from "./origin";
import { FRAMES } from "./request";
import {
  type Close,
  MAX_MESSAGE_BYTES,
  type OpenStream,
  type Request as Asked,
  Session,
} from "./session";
import type { Env } from "./settings";
import { wait } from "./time";

const SOFTWARE = `tailrace-edge/${version}`;
const SUBPROTOCOL = "tailrace";
const HEARTBEAT_MS = 4_000;
const HELLO_TIMEOUT_MS = 10_000;
/** What waits in the runtime for a client that does not read. */
const MAX_BUFFERED_BYTES = 64 << 10;
const BUFFERED_POLL_MS = 20;
/** Of answers that no credit bounds, for a client that asks and does not read: it is closed. */
const MAX_UNREAD_BYTES = 1 << 20;
/** How long a stream is asked for again whose object is lost. */
const OBJECT_PATIENCE_MS = 30_000;
const OBJECT_RETRY_MS = 200;
const NORMAL_CLOSURE = 1000;
/** What stands for a close without a code, and for none: never sent (RFC 6455, 7.4.1). */
const NO_CODE = 1005;
const NO_CLOSE = 1006;
const POLICY_VIOLATION = 1008;

/** What outlives the sleep of a session. */
interface Kept {
  greeted: boolean;
  left: number[];
  /** Who asks: headers of the request that opened it. */
  headers: [string, string][];
}

export class SessionObject extends DurableObject<Env> {
  #socket: WebSocket | null = null;
  #session = new Session(SOFTWARE);
  #headers: [string, string][] = [];
  #beating: ReturnType<typeof setInterval> | null = null;

  constructor(ctx: DurableObjectState, env: Env) {
    super(ctx, env);
    const [socket] = ctx.getWebSockets();
    if (socket === undefined) return;
    const kept = socket.deserializeAttachment() as Kept;
    this.#socket = socket;
    this.#headers = kept.headers;
    this.#session = new Session(SOFTWARE, kept.greeted, kept.left);
  }

  override async fetch(request: Request): Promise<Response> {
    const [client, server] = Object.values(new WebSocketPair()) as [WebSocket, WebSocket];
    this.ctx.acceptWebSocket(server);
    this.#socket = server;
    this.#headers = credentialsOf(request.headers);
    this.#flush();
    this.#keep();
    setTimeout(() => {
      this.#session.timeOut();
      this.#flush();
    }, HELLO_TIMEOUT_MS);
    const offered = request.headers.get("Sec-WebSocket-Protocol")?.split(",") ?? [];
    const chosen = offered.some((each) => each.trim() === SUBPROTOCOL);
    const headers = chosen ? { "Sec-WebSocket-Protocol": SUBPROTOCOL } : {};
    return new Response(null, { status: 101, webSocket: client, headers });
  }

  override async webSocketMessage(socket: WebSocket, message: ArrayBuffer | string): Promise<void> {
    if (bufferedBytes(socket) > MAX_UNREAD_BYTES) {
      this.#leave({ code: POLICY_VIOLATION, reason: "answers are not read" });
      return;
    }
    const session = this.#session;
    const wasGreeted = session.greeted;
    const asked = session.receive(message, Date.now());
    this.#flush();
    for (const [corr, frame] of asked) this.ctx.waitUntil(this.#answer(corr, frame));
    if (session.greeted && !wasGreeted) this.ctx.waitUntil(this.#beat());
    this.#keep();
  }

  /** A client that closes waits for the answer, ten seconds and more. */
  override async webSocketClose(socket: WebSocket, code: number): Promise<void> {
    socket.close(code === NO_CODE || code === NO_CLOSE ? NORMAL_CLOSURE : code);
    this.#detachAll();
  }

  override async webSocketError(): Promise<void> {
    this.#detachAll();
  }

  // ---- requests ----

  async #answer(corr: number, frame: Asked): Promise<void> {
    const stream = this.#session.streams.get(corr);
    if (stream === undefined) return;
    try {
      if (frame.type === "Open") await this.#open(corr, stream, frame);
      else if (frame.type === "Resume") await this.#resume(corr, stream, frame);
      else await this.#change(corr, stream, frame);
    } catch (error) {
      if (!(error instanceof TailraceError)) console.error(error);
      const fault =
        error instanceof TailraceError
          ? error
          : new TailraceError("an error of this edge; its log says more", { status: 500 });
      if (this.#isOpen(corr, stream)) {
        this.#closed(corr, stream, false);
        this.#session.unfinished.refused(corr);
        this.#session.refuse(corr, fault);
      }
    }
    this.#flush();
    this.#keep();
  }

  async #open(corr: number, stream: OpenStream, open: Open): Promise<void> {
    const headers = this.#asking(null);
    headers.set("Content-Type", FRAMES);
    const key = open.idempotency_key ?? randomKey();
    const answer = await begin(this.env, headers, encode({ ...open, idempotency_key: key }));
    if (answer.status !== 200) throw await errorOf(answer);
    await answer.body?.cancel();
    const opened = openedOf(answer.headers);
    const siblings = opened.siblings.map((each) => each.stream);
    this.#session.unfinished.opened(corr, opened.stream, siblings, Date.now());
    if (!this.#isOpen(corr, stream)) {
      this.#session.unfinished.close(corr, opened.stream, Date.now());
      return;
    }
    stream.id = opened.stream;
    this.#send(encode(opened, corr));
    await this.#follow(corr, stream, opened.token, answer.headers, null);
  }

  async #resume(corr: number, stream: OpenStream, resume: Resume): Promise<void> {
    const answer = await this.#read(stream, resume.token ?? null, null, !resume.follow);
    if (answer.status !== 200 && answer.status !== 204) throw await errorOf(answer);
    if (!this.#isOpen(corr, stream)) {
      await answer.body?.cancel();
      return;
    }
    const opened = openedOf(answer.headers);
    this.#send(encode(opened, corr));
    if (answer.status === 200) {
      await this.#follow(corr, stream, opened.token || resume.token || "", null, answer);
      return;
    }
    this.#closed(corr, stream, true);
    const state = "ended";
    this.#send(
      encode({ type: "Status", stream: opened.stream, state, next_index: stream.next }, corr),
    );
  }

  /** Cancel or Steer: a request of its own to the origin's edge. */
  async #change(corr: number, stream: OpenStream, frame: Cancel | Steer): Promise<void> {
    const origin = new Origin(this.env.TAILRACE_ORIGIN_URL);
    const url = origin.url(`${START}/${frame.stream}/${frame.type.toLowerCase()}`);
    const headers = this.#asking(frame.token ?? null);
    const asked = { method: "POST", headers };
    const answer =
      frame.type === "Cancel"
        ? await origin.ask(url, asked)
        : await origin.askOnce(url, { ...asked, body: JSON.stringify({ text: frame.text }) });
    if (answer.status !== 200) throw await errorOf(answer);
    const said = await answer.json<{ id: string; state: "running" | "ended"; next_index: number }>();
    if (said.state === "ended") this.#session.unfinished.ended(said.id);
    if (!this.#isOpen(corr, stream)) return;
    this.#closed(corr, stream, false);
    const { id, state, next_index } = said;
    this.#send(encode({ type: "Status", stream: id, state, next_index }, corr));
  }

  /** The stream's frames, to its end; from another body where one breaks off. */
  async #follow(
    corr: number,
    stream: OpenStream,
    token: string,
    begun: Headers | null,
    answer: Response | null,
  ): Promise<void> {
    let body = answer?.body ?? null;
    let lostMs = Date.now();
    while (this.#isOpen(corr, stream)) {
      const before = stream.next;
      try {
        if (body === null) {
          const again = await this.#read(stream, token, begun, false);
          if (again.status !== 200) throw await errorOf(again);
          body = again.body;
        }
        if (body !== null) await this.#relay(corr, stream, body);
      } catch (error) {
        if (error instanceof TailraceError && !error.retryable) throw error;
      }
      body = null;
      if (stream.next > before) lostMs = Date.now();
      if (!this.#isOpen(corr, stream)) return;
      if (Date.now() - lostMs >= OBJECT_PATIENCE_MS) {
        throw unreachable("this edge has no link to an origin");
      }
      await wait(OBJECT_RETRY_MS);
    }
  }

  #read(
    stream: OpenStream,
    token: string | null,
    begun: Headers | null,
    upToNow: boolean,
  ): Promise<Response> {
    const headers = this.#asking(token);
    if (begun !== null) headers.set(OPENED, headerOf(openedOf(begun)));
    if (upToNow) headers.set(UP_TO_NOW, "1");
    const id = stream.id ?? "";
    return objectOf(this.env, id).fetch(addressOf(id, stream.next), { headers });
  }

  #asking(token: string | null): Headers {
    const headers = new Headers(this.#headers);
    headers.set("Accept", FRAMES);
    if (token) headers.set("Tailrace-Token", token);
    return headers;
  }

  // ---- frames of a stream ----

  /** Sends what credit allows, under the client's corr, until the body or the stream ends. */
  async #relay(corr: number, stream: OpenStream, body: ReadableStream<Uint8Array>): Promise<void> {
    const source = body.getReader();
    stream.left = () => void source.cancel().catch(() => {});
    let rest = new Uint8Array();
    try {
      while (this.#isOpen(corr, stream)) {
        const { done, value } = await source.read();
        if (done) return;
        const data = rest.length === 0 ? value : joinedBytes(rest, value);
        let at = 0;
        while (at < data.length && this.#isOpen(corr, stream)) {
          const end = this.#sendable(corr, stream, data, at);
          if (end > at) this.#sendRun(corr, stream, data.subarray(at, end));
          at = end;
          await this.#drained();
          if (isWhole(data, at)) {
            await creditOf(stream, () => this.#isOpen(corr, stream));
          } else break;
        }
        rest = data.slice(at);
      }
    } finally {
      stream.left?.();
      stream.left = null;
    }
  }

  /** Where the frames end that may be sent now; their corr is put in on the way. */
  #sendable(corr: number, stream: OpenStream, data: Uint8Array, from: number): number {
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    let { next, sentBytes } = stream;
    let at = from;
    while (isWhole(data, at) && at - from < MAX_MESSAGE_BYTES) {
      const size = sizeAt(data, at);
      if (LOGGED.has(data[at + HEADER_BYTES] ?? -1)) {
        if (next >= stream.limit || sentBytes >= stream.limitBytes) break;
        next++;
        sentBytes += size;
      }
      if (at > from && at - from + size > MAX_MESSAGE_BYTES) break;
      view.setUint32(at + HEADER_BYTES + 1, corr, true);
      at += size;
    }
    return at;
  }

  #sendRun(corr: number, stream: OpenStream, run: Uint8Array): void {
    let start = 0;
    for (let at = 0; at < run.length; ) {
      const tag = run[at + HEADER_BYTES];
      const end = at + sizeAt(run, at);
      if (tag === TAGS.Heartbeat) {
        if (at > start) this.#send(run.subarray(start, at)); // a sign of life says nothing here
        start = end;
      } else if (LOGGED.has(tag ?? -1)) {
        stream.next++;
        stream.sentBytes += end - at;
      }
      if (CLOSING.has(tag ?? -1)) {
        this.#closed(corr, stream, tag === TAGS.StreamEnd);
      }
      at = end;
    }
    if (start < run.length) this.#send(run.subarray(start));
  }

  #isOpen(corr: number, stream: OpenStream): boolean {
    return this.#session.streams.get(corr) === stream;
  }

  #closed(corr: number, stream: OpenStream, ended: boolean): void {
    if (ended && stream.id !== null) this.#session.unfinished.ended(stream.id);
    this.#session.detach(corr);
  }

  #detachAll(): void {
    for (const corr of [...this.#session.streams.keys()]) this.#session.detach(corr);
    this.#socket = null;
    this.#keep();
  }

  // ---- to the client ----

  #send(bytes: Uint8Array): void {
    try {
      this.#socket?.send(bytes);
    } catch {
      this.#detachAll(); // it has closed
    }
  }

  async #drained(): Promise<void> {
    while (this.#socket !== null && bufferedBytes(this.#socket) > MAX_BUFFERED_BYTES) {
      await wait(BUFFERED_POLL_MS);
    }
  }

  #flush(): void {
    const { replies, close } = this.#session;
    this.#session.replies = [];
    for (const reply of replies) this.#send(reply);
    if (close !== null) this.#leave(close);
  }

  #leave({ code, reason }: Close): void {
    this.#socket?.close(code, reason);
    this.#detachAll();
  }

  /** The origin's readiness: at the greeting, and while a stream is open. */
  async #beat(): Promise<void> {
    const origin = new Origin(this.env.TAILRACE_ORIGIN_URL);
    let said = { ready: false, reasons: ["this edge has no link to an origin"], models: [], devices: [] };
    try {
      said = await (await origin.ask(origin.url("/readyz"), {})).json();
    } catch (error) {
      if (!(error instanceof TailraceError || error instanceof SyntaxError)) throw error;
    }
    const { ready, reasons, models = [], devices = [] } = said; // without a key an edge names neither
    const beat: Frame = {
      ...{ type: "Heartbeat", clock_ms: Date.now(), ready, reasons, models, devices },
      ...{ patience_ms: 0, streams: 0, room: 0, corrs: 0, ledger: "", tiers: [] },
    };
    this.#send(encode(beat));
  }

  /** Nothing is awake for a session that has no open stream. */
  #keep(): void {
    const isBusy = this.#session.streams.size > 0;
    if (isBusy && this.#beating === null) {
      this.#beating = setInterval(() => this.ctx.waitUntil(this.#beat()), HEARTBEAT_MS);
    } else if (!isBusy && this.#beating !== null) {
      clearInterval(this.#beating);
      this.#beating = null;
    }
    if (isBusy || this.#socket === null) return;
    const { greeted, unfinished } = this.#session;
    const kept: Kept = { greeted, left: unfinished.left, headers: this.#headers };
    this.#socket.serializeAttachment(kept);
  }
}

/** The API key of who opened the WebSocket, which every request of the session says. */
function credentialsOf(headers: Headers): [string, string][] {
  const names = ["Authorization", "Tailrace-Key", "X-Forwarded-For", "X-Forwarded-Proto"];
  const kept = names.flatMap((name): [string, string][] => {
    const value = headers.get(name);
    return value === null ? [] : [[name, value]];
  });
  const key = keyOffered(headers);
  return key === null ? kept : [...kept, ["Tailrace-Key", key]];
}

/** A page can say its key in a subprotocol only. */
export function keyOffered(headers: Headers): string | null {
  const offered = headers.get("Sec-WebSocket-Protocol")?.split(",") ?? [];
  const keys = offered.map((each) => each.trim()).filter((each) => each.startsWith("tailrace-key."));
  return keys[0]?.slice("tailrace-key.".length) ?? null;
}

function bufferedBytes(socket: WebSocket): number {
  return (socket as WebSocket & { bufferedAmount?: number }).bufferedAmount ?? 0;
}

function isWhole(data: Uint8Array, at: number): boolean {
  return data.length - at > HEADER_BYTES && data.length - at >= sizeAt(data, at);
}

async function creditOf(stream: OpenStream, isOpen: () => boolean): Promise<void> {
  while (isOpen() && (stream.next >= stream.limit || stream.sentBytes >= stream.limitBytes)) {
    await new Promise<void>((resolve) => (stream.wake = resolve));
  }
  stream.wake = null;
}

function joinedBytes(one: Uint8Array, other: Uint8Array): Uint8Array {
  const both = new Uint8Array(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}
