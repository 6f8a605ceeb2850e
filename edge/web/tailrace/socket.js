// Reads streams over WebSockets. All streams of one edge share one WebSocket.

import { typeOf } from "./bare.js";
import { Splitter, decode } from "./decode.js";
import { encode, fromHex } from "./encode.js";
import { TailraceError, broken, errorOf, unreachable } from "./errors.js";
import { SCHEMA_ID } from "./schema.js";
import { CLOSING, REQUEST_FIELDS } from "./schema_client.js";
import { tagOf } from "./wire.js";

/** @typedef {import("./connection.js").Asked} Asked */
/** @typedef {import("./connection.js").Report} Report */
/** @typedef {import("./connection.js").System} System */
/** @typedef {import("./core.js").Allowance} Allowance */

/** Time for which a WebSocket without streams is kept. */
const IDLE_MS = 5_000;
const DIGITS = /^\d+$/;
/** Smaller numbers are probably seconds, and are refused, as by the parameter of a GET. */
const MIN_UNIX_MS = 100_000_000_000;
const ZONED = /(Z|[+-]\d\d:\d\d)$/i;
const SAMPLING = (typeOf("Sampling").columns ?? []).map(({ name }) => name);

/** @type {WeakMap<System, Map<string, Session>>} */
const known = new WeakMap();

/** @type {import("./connection.js").Connect} */
export function bySocket(asked, system, report) {
  const url = new URL("ws", asked.url);
  url.protocol = url.protocol.replace("http", "ws");
  const name = `${url} ${asked.apiKey ?? ""}`;
  const sessions = known.get(system) ?? new Map();
  known.set(system, sessions);
  let session = sessions.get(name);
  if (!session) {
    session = new Session(url, asked.apiKey, system, () => sessions.delete(name));
    sessions.set(name, session);
  }
  return session.open(asked, report);
}

/** One WebSocket and the streams that are read over it. */
class Session {
  /** @type {Map<number, Report>} */
  #readers = new Map();
  /** @type {Uint8Array<ArrayBuffer>[] | null} */
  #unsent = [encode({ type: "Hello", schema: fromHex(SCHEMA_ID), software: "tailrace-web", compression: null })];
  #corr = 0;
  /** @type {any} */
  #idle = null;

  /** @param {URL} url @param {string | null} apiKey @param {System} system @param {() => void} gone
   */
  constructor(url, apiKey, system, gone) {
    this.system = system;
    this.gone = gone;
    const Socket = /** @type {typeof WebSocket} */ (system.WebSocket);
    this.socket = new Socket(url, apiKey ? ["tailrace", `tailrace-key.${apiKey}`] : []);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => {
      const unsent = this.#unsent ?? [];
      this.#unsent = null;
      for (const bytes of unsent) this.socket.send(bytes);
    };
    this.socket.onmessage = ({ data }) => this.#receive(new Uint8Array(data));
    // Node.js reports a failed handshake with an error event alone.
    this.socket.onclose = this.socket.onerror = (event) => {
      const how = "code" in event ? `closed with ${event.code}` : "refused";
      const said = `the WebSocket was ${how}`;
      this.#end(this.#unsent ? unreachable(url, said) : broken("edge_unreachable", said));
    };
  }

  /** @param {Asked} asked @param {Report} report @returns {import("./connection.js").Connection} */
  open(asked, report) {
    const corr = (this.#corr = (this.#corr % 0xffffffff) + 1);
    this.#send(requestOf(asked), corr);
    this.#readers.set(corr, report);
    this.system.clearTimer(this.#idle);
    let told = asked.allowance;
    return {
      allow: (allowance) => {
        if (!isWorthTelling(told, allowance) || !this.#readers.has(corr)) return;
        told = allowance;
        this.#send({ type: "Credit", ...allowance }, corr);
      },
      close: (isSilent) => {
        if (this.#readers.has(corr) && !isSilent) this.#send({ type: "Detach" }, corr);
        this.#leave(corr);
        if (isSilent) this.#end(broken("silent", "the WebSocket says nothing any more"));
      },
    };
  }

  /** @param {import("./schema.js").Frame} frame @param {number} corr */
  #send(frame, corr) {
    const bytes = encode(frame, corr);
    if (this.#unsent) this.#unsent.push(bytes);
    else if (this.socket.readyState === 1) this.socket.send(bytes);
  }

  /** @param {number} corr */
  #leave(corr) {
    if (!this.#readers.delete(corr) || this.#readers.size) return;
    this.#idle = this.system.setTimer(() => this.#end(null), IDLE_MS);
  }

  /** Handle one message, which has whole frames. @param {Uint8Array} message */
  #receive(message) {
    try {
      const splitter = new Splitter();
      for (const raw of splitter.feed(message)) this.#dispatch(raw);
      if (splitter.pending) throw broken("bad_frame", "a message ends inside a frame");
    } catch (error) {
      this.#end(broken("bad_frame", String(error), error));
    }
  }

  /** @param {Uint8Array} raw */
  #dispatch(raw) {
    const { corr, frame } = decode(raw);
    const report = this.#readers.get(corr);
    if (frame.type === "StreamError" && corr === 0) return this.#end(errorOf(frame));
    if (corr === 0) for (const each of this.#readers.values()) each.alive(); // a Heartbeat counts for all streams
    if (!report) return; // a frame of the connection, or of a stream that is not read any more
    if (CLOSING.has(tagOf(raw))) this.#leave(corr);
    if (frame.type === "Opened") {
      report.opened({ id: frame.stream, token: frame.token || null, siblings: frame.siblings });
    } else if (frame.type === "StreamError") {
      report.lost(errorOf(frame)); // also if the stream was refused, before any Opened
    } else {
      report.frame(frame, raw.length);
    }
  }

  /** Close the WebSocket and report the error to its streams. @param {TailraceError | null} error
   */
  #end(error) {
    this.gone();
    this.system.clearTimer(this.#idle);
    this.socket.onclose = this.socket.onerror = this.socket.onmessage = null;
    this.socket.close();
    const readers = [...this.#readers.values()];
    this.#readers.clear();
    for (const report of readers) if (error) report.lost(error);
  }
}

/** Return true if half of a window has been used since the last Credit. @param {Allowance} told
 * @param {Allowance} now
 */
const isWorthTelling = (told, now) =>
  now.limit - told.limit >= 128 || now.bytes - told.bytes >= 131_072;

/** @param {Asked} asked @returns {import("./schema.js").Frame} */
function requestOf(asked) {
  const { id, token, input, idempotencyKey, nextIndex, allowance } = asked;
  const credit = { credit: allowance.limit - nextIndex, credit_bytes: allowance.bytes, caller: null };
  if (id) {
    const after = nextIndex ? nextIndex - 1 : null;
    const { tail = null, since, snapshot = false } = asked;
    const since_ms = since === undefined ? null : msOf(since);
    return { type: "Resume", stream: id, after, token, follow: true, ...credit, tail, since_ms, snapshot };
  }
  return { ...openOf(input ?? {}), idempotency_key: idempotencyKey, ...credit };
}

/** Return a time in Unix milliseconds, which may also be a time of RFC 3339 with its time zone.
 * @param {number | string} time
 */
function msOf(time) {
  const text = String(time);
  if (DIGITS.test(text) && Number(text) >= MIN_UNIX_MS) return Number(text);
  if (ZONED.test(text) && Date.parse(text) >= 0) return Date.parse(text);
  const hint = "such as 2026-11-28T09:30:00Z, or Unix milliseconds";
  throw new TailraceError(`${time} is not a time`, { code: "invalid_request", status: 400, field: "since", hint });
}

/** Return the Open frame of a JSON request. @param {Record<string, any>} input
 * @returns {import("./schema.js").Open}
 */
function openOf(input) {
  for (const name of Object.keys(input)) {
    if (!REQUEST_FIELDS.includes(name)) {
      throw new TailraceError(`unknown field ${name}`, { code: "unknown_field", status: 400, field: name });
    }
  }
  const { format, stop, unread } = input;
  const sampling = /** @type {any} */ (Object.fromEntries(SAMPLING.map((name) => [name, input[name]])));
  return /** @type {any} */ ({
    type: "Open",
    ...input,
    sampling,
    messages: input.messages ?? [],
    stop: typeof stop === "string" ? [stop] : (stop ?? []),
    ignore_eos: input.ignore_eos ?? false,
    format: format && {
      kind: format.regex === undefined ? "json-schema" : "regex",
      source: format.regex ?? JSON.stringify(format.json_schema),
    },
    overflow: input.overflow ?? "refuse",
    n: input.n ?? 1,
    durability: input.durability ?? "process",
    priority: input.priority ?? "standard",
    unread: unread?.then ?? unread ?? "run",
    unread_after_s: unread?.after_s,
    stages: Object.entries(input.stages ?? {}).map(([stage, on]) => ({ stage, on })),
  });
}
