// One stream for its reader: every frame once and in order, also when connections break.

import { TailraceError, broken } from "./errors.js";
import { Core } from "./core.js";
import { asTailraceError, httpError, tokenHeader } from "./fetch.js";
import { Transcript } from "./transcript.js";
import { CONNECT, choose, countFetches, worked } from "./transport.js";

/** @typedef {import("./core.js").StreamFrame} StreamFrame */
/** @typedef {import("./core.js").State} State */
/** @typedef {import("./connection.js").System} System */
/** @typedef {Pick<Storage, "getItem" | "setItem" | "removeItem">} Store */

/** @typedef {object} Options
 * @property {import("./schema.js").GenerateInput} [input] the body of POST /v1/generate: a new stream
 * @property {string} [token] the resume token of an existing stream, if the edge requires one
 * @property {number} [after] the index of the last frame that the reader has
 * @property {number} [tail] begin with the newest frames of an existing stream, this many
 * @property {number | string} [since] begin with the frames of an existing stream that were stored at
 *   or after this time: Unix milliseconds, or a time of RFC 3339
 * @property {boolean} [snapshot] the text that there is already comes as one Snapshot frame
 * @property {import("./connection.js").Group} [group] the edge joins the text of frames: "sentence", or
 *   { by: "sentence", ms: 200, chars: 80 }. Several frames come as one Snapshot frame
 * @property {AbortSignal} [signal] detaches when it is aborted
 * @property {(state: State, stream: Stream) => void} [onState] called when `state` or `quiet` has changed
 * @property {Store} [storage] keeps the position for a reload: sessionStorage, or localStorage for all tabs
 * @property {string} [key] the name in the storage, if a page has several streams; the URL if left out
 * @property {"auto" | "fetch" | "websocket"} [transport]
 * @property {string} [apiKey]
 * @property {Record<string, string>} [headers] headers of every request by fetch
 * @property {string} [idempotencyKey] requests with the same key start only one stream
 * @property {string} [openUrl] URL at which a new stream is requested, by fetch, instead of `url`: another
 *   route of the edge that answers with frames, such as /api/chat
 * @property {string | null} [openToken] the resume token that a request at `openUrl` needs
 * @property {{leastMs?: number, mostMs?: number, patienceMs?: number}} [backoff]
 * @property {System} [system] for tests
 */

/** @typedef {{id: string, state: string, next_index: number}} Status */

/** The request for a new stream.
 * @typedef {{input: any, openUrl?: string, openToken?: string | null}} OpenRequest
 */
/** The stored facts of a stream, until it is forgotten. `input` is null once the stream has an id.
 * @typedef {OpenRequest & {id: string | null, token: string | null, next: number, idempotencyKey: string}} Saved
 */

const SAVE_EVERY_MS = 1_000;
/** Errors after which the connection delivers nothing. */
const DEAD = ["silent", "offline"];
const JSON_TYPE = { "Content-Type": "application/json" };
const OPENED = /^(.*)\/([0-9a-f]{32})$/;

/** @implements {AsyncIterable<StreamFrame>} */
export class Stream {
  /** The id, once the stream has opened. @type {string | null} */
  id = null;
  /** @type {string | null} */
  token = null;
  /** The other streams of a request with `n` > 1. @type {readonly {stream: string, token:
   * string}[]}
   */
  siblings = [];
  /** The last frame, once it was read. @type {import("./schema.js").StreamEnd | null} */
  end = null;
  /** The transport in use. @type {import("./transport.js").Transport | null} */
  transport = null;
  /** The number of connections after the first. */
  resumes = 0;
  /** Frames before this index were shown before a reload. */
  seen = 0;

  #core;
  #transcript = new Transcript();
  /** @type {Set<() => void>} */
  #watchers = new Set();
  #options;
  #system;
  #url;
  /** @type {Required<OpenRequest>} */
  #open;
  #idempotencyKey;
  /** @type {import("./connection.js").Connection | null} */
  #connection = null;
  #wasOpen = false;
  #savedAt = -Infinity;
  /** @type {any} */
  #timer = null;
  #timerAt = Infinity;
  #told = "idle false";
  /** @type {(() => void)[]} */
  #waiting = [];
  /** @type {(() => void) | null} */
  #unlisten = null;

  /** @param {string} url @param {Options} options @param {System} system @param {Saved | null} saved
   */
  constructor(url, options, system, saved) {
    const [base, id] = partsOf(url);
    this.#url = base;
    this.#options = options;
    this.#system = system;
    this.#open = {
      input: saved?.input ?? options.input ?? null,
      openUrl: saved?.openUrl ?? options.openUrl ?? base,
      openToken: saved?.openToken ?? options.openToken ?? null,
    };
    this.#idempotencyKey = saved?.idempotencyKey ?? options.idempotencyKey ?? newKey();
    this.id = saved?.id ?? id ?? null;
    this.token = saved?.token ?? options.token ?? null;
    this.seen = saved?.next ?? 0;
    if (!this.id && !this.#open.input) {
      throw new TailraceError("neither input nor a stream's id", {
        code: "invalid_request",
        field: "input",
        hint: 'stream("/v1/generate", { input: { model, prompt } }), or stream("/v1/generate/ID")',
      });
    }
    this.#core = new Core((options.after ?? -1) + 1, system.random, options.backoff);
    this.#core.floats = this.id !== null && (options.tail ?? options.since) !== undefined;
    this.#save();
    if (options.signal?.aborted) this.detach();
    else {
      options.signal?.addEventListener("abort", () => this.detach(), { once: true });
      this.reconnect();
    }
  }

  // ---- for the reader ----

  /** @returns {State} */
  get state() {
    return this.#core.state;
  }

  /** The last error, while the state is `waiting` or `failed`. */
  get error() {
    return this.#core.fault;
  }

  /** True if the stream is open and has had frames, but none for 2 s. */
  get quiet() {
    return this.#core.quiet;
  }

  /** The index of the next frame. */
  get nextIndex() {
    return this.#core.taken;
  }

  /** The text of all frames that were taken, with revisions applied. */
  get content() {
    return this.#transcript.text;
  }

  /** Call `act` whenever `state` or `quiet` changes. Return a function that stops this. @param {()
   * => void} act
   */
  watch(act) {
    this.#watchers.add(act);
    return () => void this.#watchers.delete(act);
  }

  /** @returns {AsyncIterator<StreamFrame, undefined>} */
  [Symbol.asyncIterator]() {
    return {
      next: async () => {
        const value = await this.#next();
        return value ? { value, done: false } : { value, done: true };
      },
      return: async () => {
        this.detach();
        return { value: undefined, done: true };
      },
    };
  }

  /** The frames as a ReadableStream. @returns {ReadableStream<StreamFrame>} */
  get readable() {
    return new ReadableStream(
      {
        pull: async (controller) => {
          const frame = await this.#next();
          if (frame) controller.enqueue(frame);
          else controller.close();
        },
        cancel: () => this.detach(),
      },
      { highWaterMark: 0 },
    );
  }

  /** Return the whole text when the stream has ended. Throws a TailraceError if the generation
   * failed.
   */
  async text() {
    for await (const _ of this);
    const { finish_reason = "stop", message = null, retryable = false } = this.end ?? {};
    if (finish_reason === "failed" || finish_reason === "origin-lost") {
      throw new TailraceError(message ?? finish_reason, { code: finish_reason, status: 500, retryable });
    }
    return this.content;
  }

  /** End the stream for all its readers. Return its status, `{id, state, next_index}`. */
  async cancel() {
    await this.#begun();
    return patiently(() => this.#post("cancel"), this.#url, this.#system, this.#options.backoff);
  }

  /** Insert a text, from which the generation continues. Return the status, as `cancel` does. The
   * request is never repeated, because that would insert the text twice.
   * @param {string} text
   */
  async steer(text) {
    await this.#begun();
    return this.#post("steer", JSON.stringify({ text }));
  }

  /** Stop reading. The generation goes on, and `reconnect` continues to read where this stopped. */
  detach() {
    this.#core.detach();
    this.#settle();
  }

  /** Read again after a failure or a detach, or stop waiting and try at once. */
  reconnect() {
    const now = this.#system.now();
    if (this.#core.state === "waiting") this.#core.wake(now);
    else this.#core.restart(now);
    this.#settle();
  }

  /** Remove the stream from the storage. */
  forget() {
    this.#options.storage?.removeItem(keyOf(this.#options, this.#url));
  }

  // ---- frames ----

  async #next() {
    for (;;) {
      const frame = this.#core.take();
      if (frame) {
        this.#connection?.allow(this.#core.allowance);
        this.#transcript.add(frame);
        if (frame.type === "StreamEnd") this.end = frame;
        this.#saveSometimes(frame.type === "StreamEnd");
        this.#wakeWaiting();
        return frame;
      }
      if (this.#core.state === "failed") throw this.#core.fault;
      if (this.#isOver()) return undefined;
      if (this.#core.state === "suspended") this.reconnect();
      await this.#change();
    }
  }

  async #begun() {
    while (!this.id && !this.#isOver()) await this.#change();
    if (!this.id) throw this.#core.fault ?? new TailraceError("it never began", { code: "not_found" });
  }

  #isOver() {
    return ["failed", "detached", "ended"].includes(this.#core.state);
  }

  /** @returns {Promise<void>} */
  #change() {
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  #wakeWaiting() {
    const waiting = this.#waiting;
    if (!waiting.length) return;
    this.#waiting = [];
    for (const resolve of waiting) resolve();
  }

  // ---- connection and timer ----

  /** Do what the state of the core requires, and call the watchers. */
  #settle() {
    const core = this.#core;
    const isConnected = core.state === "connecting" || core.state === "open";
    if (!isConnected) this.#hangUp();
    else if (!this.#connection) this.#dial();
    if (isConnected || core.state === "waiting") {
      this.#unlisten ??= this.#system.onWake(
        () => this.#woken(),
        () => this.#cut(),
      );
    } else {
      this.#unlisten?.();
      this.#unlisten = null;
    }
    this.#setTimer();
    const told = `${core.state} ${core.quiet}`;
    if (told !== this.#told) {
      this.#told = told;
      this.#options.onState?.(core.state, this);
      for (const act of this.#watchers) act();
    }
    this.#wakeWaiting();
  }

  #woken() {
    this.#core.wake(this.#system.now());
    this.#settle();
  }

  #cut() {
    this.#core.lost(broken("offline", "no network"), this.#system.now());
    this.#settle();
  }

  #setTimer() {
    const { due } = this.#core;
    if (due !== null && due >= this.#timerAt) return; // the timer rings earlier, and is then set again
    this.#system.clearTimer(this.#timer);
    this.#timerAt = due ?? Infinity;
    if (due === null || due === Infinity) return;
    this.#timer = this.#system.setTimer(
      () => {
        this.#timerAt = Infinity;
        this.#core.tick(this.#system.now());
        this.#settle();
      },
      Math.max(0, due - this.#system.now()),
    );
  }

  #dial() {
    const { apiKey = null, transport = "auto", snapshot, tail, since } = this.#options;
    const { failures, allowance, nextIndex, floats } = this.#core;
    const { input, openUrl, openToken } = this.#open;
    const group = this.#options.group ?? input?.group ?? undefined;
    const body = this.id ? 0 : 3 * JSON.stringify(input).length;
    const hasSockets = Boolean(this.#system.WebSocket);
    let chosen = transport === "auto" ? choose(this.#url, failures, hasSockets, body) : transport;
    if (group || (!this.id && (openUrl !== this.#url || input.chat))) chosen = "fetch";
    if (chosen === "fetch") countFetches(this.#url, 1);
    this.transport = chosen;
    const asked = {
      url: this.#url,
      openUrl,
      id: this.id,
      token: this.id ? this.token : openToken,
      input,
      idempotencyKey: this.#idempotencyKey,
      nextIndex,
      snapshot,
      group,
      ...(floats && { tail, since }),
      headers: this.#headers,
      apiKey,
      allowance,
    };
    try {
      const connection = CONNECT[chosen](asked, this.#system, this.#report(chosen));
      this.#connection = connection;
      this.#core.alive(this.#system.now() + (connection.uploadMs ?? 0));
    } catch (error) {
      // The request cannot be encoded, or the transport does not exist. A retry cannot help.
      this.#core.lost(error instanceof TailraceError ? error : new TailraceError(String(error)), 0);
    }
  }

  #hangUp() {
    const connection = this.#connection;
    if (!connection) return;
    this.#connection = null;
    if (this.transport === "fetch") countFetches(this.#url, -1);
    connection.close(DEAD.includes(this.#core.fault?.code ?? ""));
  }

  /** Return the callbacks of one connection, which have an effect only while it is in use.
   * @param {import("./transport.js").Transport} transport
   * @returns {import("./connection.js").Report}
   */
  #report(transport) {
    const core = this.#core;
    const now = this.#system.now;
    /** @type {import("./connection.js").Connection | null} */
    let own = null;
    const isCurrent = () => {
      own ??= this.#connection;
      return own !== null && own === this.#connection;
    };
    /** @template {any[]} T @param {(...told: T) => void} act */
    const current = (act) => (/** @type {T} */ ...told) => {
      if (!isCurrent()) return;
      act(...told);
      this.#settle();
    };
    return {
      opened: current(({ id, token, siblings }) => {
        worked(this.#url, transport, core.failures);
        this.id = id ?? this.id;
        this.token = token ?? this.token;
        if (siblings.length) this.siblings = siblings;
        this.resumes += Number(this.#wasOpen);
        this.#wasOpen = true;
        core.opened();
        core.alive(now());
        this.#save();
      }),
      frame: current((frame, bytes) => core.receive(frame, bytes, now())),
      alive: () => isCurrent() && core.alive(now()),
      ended: current(() => core.ended()),
      lost: current((error) => core.lost(error, now())),
      room: async () => {
        while (isCurrent() && core.full) await this.#change();
      },
    };
  }

  get #headers() {
    return headersOf(this.#options);
  }

  /** @param {string} what @param {string} [body] */
  async #post(what, body) {
    const response = await this.#system.fetch(`${this.#url}/${this.id}/${what}`, {
      method: "POST",
      keepalive: true, // the request is sent even if the page is left now
      headers: { ...this.#headers, ...tokenHeader(this.token), ...(body && JSON_TYPE) },
      body,
    });
    if (!response.ok) throw await httpError(response);
    return /** @type {Promise<Status>} */ (response.json());
  }

  // ---- storage ----

  /** @param {boolean} isLast */
  #saveSometimes(isLast) {
    const now = this.#system.now();
    if (isLast || now - this.#savedAt >= SAVE_EVERY_MS) this.#save();
  }

  #save() {
    const { storage } = this.#options;
    if (!storage) return;
    this.#savedAt = this.#system.now();
    /** @type {Saved} */
    const saved = {
      id: this.id,
      token: this.token,
      next: Math.max(this.seen, this.#core.taken),
      // Without an id the request may have to be sent again.
      ...(this.id ? { input: null } : this.#open),
      idempotencyKey: this.#idempotencyKey,
    };
    try {
      storage.setItem(keyOf(this.#options, this.#url), JSON.stringify(saved));
    } catch {
      // The storage is full or forbidden, so a reload cannot resume. Nothing else changes.
    }
  }
}

/** Return the URL of /v1/generate, and the stream's id if the URL has one. @param {string} url
 * @returns {[string, string | undefined]}
 */
export function partsOf(url) {
  const { origin, pathname } = new URL(url, globalThis.location?.href);
  const [, base, id] = pathname.match(OPENED) ?? [];
  return [origin + (base ?? pathname), id];
}

/** Return the headers of every request. @param {Pick<Options, "apiKey" | "headers">} options
 * @returns {Record<string, string>}
 */
export const headersOf = ({ apiKey, headers = {} }) =>
  apiKey ? { ...headers, Authorization: `Bearer ${apiKey}` } : headers;

/** Repeat a request that may be sent twice until it succeeds, or the patience of `backoff` is over.
 * @template T
 * @param {() => Promise<T>} request
 * @param {string} url
 * @param {System} system
 * @param {Options["backoff"]} backoff
 */
export async function patiently(request, url, system, backoff) {
  const patience = new Core(0, system.random, backoff);
  for (;;) {
    patience.start(system.now());
    try {
      return await request();
    } catch (error) {
      patience.lost(asTailraceError(error, url), system.now());
      if (patience.state === "failed") throw patience.fault;
      const wait = (patience.due ?? 0) - system.now();
      await new Promise((ring) => system.setTimer(() => ring(null), wait));
    }
  }
}

/** @param {Options} options @param {string} url */
export const keyOf = ({ key }, url) => `tailrace ${key ?? url}`;

const newKey = () =>
  Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(36)).join("-");
