// How far one stream has been read, and what its reader does next: a table, fed events and a clock.
//
// No input and no output. Whoever holds a Core tells it what happened, and then does what its
// state says: in `connecting` there is to be a connection, in `waiting` a timer (`due`), else
// neither. Each logged frame is given once and in order, whatever the connections bring.

import { SILENCE_MS } from "./connection.js";
import { broken, errorOf } from "./errors.js";

/** @typedef {import("./schema.js").Frame} Frame */
/** @typedef {import("./schema.js").Logged} Logged */
/** @typedef {"idle" | "connecting" | "open" | "waiting" | "failed" | "detached" | "ended"} State */
/** @typedef {{limit: number, bytes: number}} Allowance */

/** What each event makes of each state; what is not there changes nothing.
 * @type {Record<State, Record<string, State>>}
 */
export const TABLE = {
  idle: { start: "connecting", detach: "detached" },
  connecting: { opened: "open", lost: "waiting", fail: "failed", end: "ended", detach: "detached" },
  open: { lost: "waiting", fail: "failed", end: "ended", detach: "detached" },
  waiting: { start: "connecting", detach: "detached" },
  failed: { start: "connecting", detach: "detached" },
  detached: { start: "connecting" },
  ended: {},
};

/** Frames, and their bytes, that may lie here or be under way without having been asked for. */
export const WINDOW_FRAMES = 256;
export const WINDOW_BYTES = 262_144;
const LEAST_MS = 500;
const MOST_MS = 30_000;
/** How long to go on trying without a new frame. */
const PATIENCE_MS = 120_000;
/** After this long without a frame a stream that flowed is `quiet`. */
export const QUIET_MS = 2_000;
/** A timer that comes so late says that the page was frozen, not that the server was silent. */
const FROZEN_MS = 1_000;

export class Core {
  /** @type {State} */
  state = "idle";
  /** What made the state what it is. @type {import("./errors.js").TailraceError | null} */
  fault = null;
  /** Failures since the last new frame. */
  failures = 0;
  #isQuiet = false;
  /** When the state's own time is over. @type {number | null} */
  #over = null;
  #quietAt = Infinity;
  /** @type {{frame: Logged, size: number}[]} */
  #queue = [];
  #queuedBytes = 0;
  #receivedBytes = 0; // on this connection
  /** @type {number | null} */
  #failingSince = null;
  #notBefore = 0; // the server asks not to be asked before

  /**
   * @param {number} nextIndex
   * @param {() => number} random
   * @param {{leastMs?: number, mostMs?: number, patienceMs?: number}} [backoff]
   */
  constructor(nextIndex, random, backoff = {}) {
    /** The index that is due next. */
    this.nextIndex = nextIndex;
    this.random = random;
    this.leastMs = backoff.leastMs ?? LEAST_MS;
    this.mostMs = backoff.mostMs ?? MOST_MS;
    this.patienceMs = backoff.patienceMs ?? PATIENCE_MS;
  }

  /** @param {string} event */
  #step(event) {
    const next = TABLE[this.state][event];
    if (next) this.state = next;
    return next !== undefined;
  }

  // ---- what may happen ----

  /** Begin, or go on after a failure or a detach. @param {number} now */
  start(now) {
    if (!this.#step("start")) return;
    this.fault = null;
    this.#receivedBytes = 0;
    this.alive(now);
  }

  /** As `start`, by somebody who begins anew: earlier failures count no more. @param {number} now */
  restart(now) {
    this.failures = 0;
    this.#failingSince = null;
    this.start(now);
  }

  opened() {
    this.#step("opened");
  }

  /** The connection showed a sign of life. @param {number} now */
  alive(now) {
    this.#over = now + SILENCE_MS;
  }

  /** A frame of the stream has come. @param {Frame} frame @param {number} size @param {number} now */
  receive(frame, size, now) {
    if (this.state !== "open") return;
    this.alive(now);
    if (frame.type === "StreamError") {
      this.lost(errorOf(frame), now);
    } else if (frame.type === "Status") {
      if (frame.state === "ended") this.#end();
    } else if ("index" in frame) {
      this.#receivedBytes += size;
      this.#logged(frame, size, now);
    } else if (frame.type !== "Heartbeat") {
      this.lost(broken("bad_frame", `${frame.type} in a stream`), now);
    }
  }

  /** @param {Logged} frame @param {number} size @param {number} now */
  #logged(frame, size, now) {
    if (frame.index > this.nextIndex) {
      const said = `frame ${frame.index} came where ${this.nextIndex} was due`;
      this.lost(broken("frames_missing", said), now);
    } else if (frame.index === this.nextIndex) {
      this.nextIndex += 1;
      this.failures = 0;
      this.#failingSince = null;
      this.#isQuiet = false;
      this.#quietAt = now + QUIET_MS;
      this.#queue.push({ frame, size });
      this.#queuedBytes += size;
      if (frame.type === "StreamEnd") this.#end();
    }
  }

  /** Nothing is left to come. */
  #end() {
    this.#step("end");
    this.#rest();
  }

  /** No timer is to ring any more. */
  #rest() {
    this.#over = null;
    this.#isQuiet = false;
    this.#quietAt = Infinity;
  }

  ended() {
    this.#end();
  }

  /** The connection is of no use any more. @param {import("./errors.js").TailraceError} error @param {number} now */
  lost(error, now) {
    if (this.state !== "connecting" && this.state !== "open") return;
    this.failures += 1;
    this.fault = error;
    this.#failingSince ??= now;
    const wait = Math.max(this.#delay(), error.retryAfterMs ?? 0);
    if (!error.retryable || now + wait - this.#failingSince > this.patienceMs) {
      this.#step("fail");
      this.#rest();
    } else {
      this.#step("lost");
      this.#over = now + wait;
      this.#notBefore = now + (error.retryAfterMs ?? 0);
    }
  }

  /** Full jitter ("Exponential Backoff and Jitter", AWS Architecture Blog, 2015). */
  #delay() {
    const ceiling = Math.min(this.mostMs, this.leastMs * 2 ** Math.min(this.failures, 32));
    return this.leastMs + this.random() * (ceiling - this.leastMs);
  }

  /** The timer rang, perhaps long after it should have. @param {number} now */
  tick(now) {
    if (now >= this.#quietAt) {
      this.#isQuiet = !this.#isUnseen(now - this.#quietAt);
      this.#quietAt = this.#isQuiet ? Infinity : now + QUIET_MS;
    }
    if (this.#over === null || now < this.#over) return;
    if (this.state === "waiting") this.start(now);
    else if (this.#isUnseen(now - this.#over)) this.alive(now);
    else this.lost(broken("silent", "the connection says nothing any more"), now);
  }

  /** Return true if frames may have come that nobody has looked at: the page was frozen, or its
   * reader takes nothing. @param {number} lateMs
   */
  #isUnseen(lateMs) {
    return lateMs > FROZEN_MS || this.full;
  }

  /** The network is back, or somebody looks at the page again: do not wait any longer.
   * @param {number} now
   */
  wake(now) {
    if (this.state !== "waiting") return;
    this.#over = Math.max(now, this.#notBefore);
    this.tick(now);
  }

  /** Stop reading. What was not taken is to be read again by who goes on. */
  detach() {
    if (!this.#step("detach")) return;
    this.#rest();
    this.nextIndex -= this.#queue.length;
    this.#queue = [];
    this.#queuedBytes = 0;
  }

  // ---- what there is ----

  /** It is open, had begun to flow, and nothing has come for QUIET_MS. */
  get quiet() {
    return this.state === "open" && this.#isQuiet;
  }

  /** When the timer is to ring. @returns {number | null} */
  get due() {
    return this.#over === null ? null : Math.min(this.#over, this.#quietAt);
  }

  /** The next frame, if it has come. */
  take() {
    const head = this.#queue.shift();
    if (head) this.#queuedBytes -= head.size;
    return head?.frame;
  }

  /** The index of the first frame that nobody has taken. */
  get taken() {
    return this.nextIndex - this.#queue.length;
  }

  /** Whether no more should be read before something is taken. */
  get full() {
    return this.#queue.length >= WINDOW_FRAMES || this.#queuedBytes >= WINDOW_BYTES;
  }

  /** How far the server may send on this connection: both absolute, as Credit says it.
   * @returns {Allowance}
   */
  get allowance() {
    return {
      limit: this.taken + WINDOW_FRAMES,
      bytes: this.#receivedBytes + Math.max(0, WINDOW_BYTES - this.#queuedBytes),
    };
  }
}
