// The state machine of a stream's reader: how far it has read, and what it does next.
//
// It does no I/O: it gets events and the time. Its owner then does what the state requires: keep a
// connection in `connecting` and `open`, set a timer (`due`) in `waiting`, otherwise neither. Each
// logged frame is given once and in order, whatever the connections deliver.
//
// An HTTP response has no credit: a server notices that its reader takes nothing only when all buffers
// on the way are full, or when it is closed. So a stream whose reader takes nothing is `suspended`: its
// connection is closed until the reader has taken what is queued.

import { SILENCE_MS } from "./connection.js";
import { broken, errorOf } from "./errors.js";

/** @typedef {import("./schema.js").Frame} Frame */
/** A frame of a stream as its reader gets it: a Snapshot only if the reader asked for one.
 * @typedef {import("./schema.js").Logged | import("./schema.js").Snapshot} StreamFrame
 */
/** @typedef {"idle" | "connecting" | "open" | "suspended" | "waiting" | "failed" | "detached" | "ended"} State */
/** @typedef {{limit: number, bytes: number}} Allowance */

/** The next state for each state and event. Other events change nothing.
 * @type {Record<State, Record<string, State>>}
 */
export const TABLE = {
  idle: { start: "connecting", detach: "detached" },
  connecting: { opened: "open", lost: "waiting", fail: "failed", end: "ended", detach: "detached" },
  open: { suspend: "suspended", lost: "waiting", fail: "failed", end: "ended", detach: "detached" },
  waiting: { start: "connecting", detach: "detached" },
  suspended: { start: "connecting", detach: "detached" },
  failed: { start: "connecting", detach: "detached" },
  detached: { start: "connecting" },
  ended: {},
};

/** Maximum frames, and bytes, that are queued here or on their way before the reader takes them. */
export const WINDOW_FRAMES = 256;
export const WINDOW_BYTES = 262_144;
const LEAST_MS = 500;
const MOST_MS = 30_000;
/** Time for which a stream reconnects without getting a new frame, before it fails. */
const PATIENCE_MS = 120_000;
/** Time without a frame after which an open stream is `quiet`. */
export const QUIET_MS = 2_000;
/** A timer that is this late shows that the page was frozen, not that the server was silent. */
const FROZEN_MS = 1_000;

/** Return the index of the first frame that a frame stands for. @param {StreamFrame} frame
 * @returns {number}
 */
export const firstOf = (frame) => /** @type {any} */ (frame).first ?? frame.index;

export class Core {
  /** @type {State} */
  state = "idle";
  /** The error that led to the state, if there was one. @type {import("./errors.js").TailraceError
   * | null}
   */
  fault = null;
  /** Failures since the last new frame. */
  failures = 0;
  /** True until the first frame comes, if the server chooses which one that is. */
  floats = false;
  #isQuiet = false;
  /** The time at which the state itself times out. @type {number | null} */
  #over = null;
  #quietAt = Infinity;
  /** @type {{frame: StreamFrame, size: number}[]} */
  #queue = [];
  #queuedBytes = 0;
  #receivedBytes = 0; // bytes received on this connection
  /** @type {number | null} */
  #failingSince = null;
  #notBefore = 0; // time before which the server wants no retry

  /**
   * @param {number} nextIndex
   * @param {() => number} random
   * @param {{leastMs?: number, mostMs?: number, patienceMs?: number}} [backoff]
   */
  constructor(nextIndex, random, backoff = {}) {
    /** The index of the next frame. */
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
    return next;
  }

  // ---- events ----

  /** Begin, or continue after a failure or a detach. @param {number} now */
  start(now) {
    if (!this.#step("start")) return;
    this.fault = null;
    this.#receivedBytes = 0;
    this.alive(now);
  }

  /** Like `start`, and forget earlier failures. @param {number} now */
  restart(now) {
    this.failures = 0;
    this.#failingSince = null;
    this.start(now);
  }

  opened() {
    this.#step("opened");
  }

  /** Note that the connection works. @param {number} now */
  alive(now) {
    this.#over = now + SILENCE_MS;
  }

  /** Take a frame from the connection. @param {Frame} frame @param {number} size @param {number}
   * now
   */
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

  /** @param {StreamFrame} frame @param {number} size @param {number} now */
  #logged(frame, size, now) {
    const first = firstOf(frame);
    if (this.floats) this.nextIndex = first;
    this.floats = false;
    if (first > this.nextIndex) {
      this.lost(broken("frames_missing", `frame ${this.nextIndex} is missing`), now);
    } else if (first === this.nextIndex) {
      this.nextIndex = frame.index + 1;
      this.failures = 0;
      this.#failingSince = null;
      this.#isQuiet = false;
      this.#quietAt = now + QUIET_MS;
      this.#queue.push({ frame, size });
      this.#queuedBytes += size;
      if (frame.type === "StreamEnd") this.#end();
    }
  }

  /** Note that all frames have arrived. */
  #end() {
    this.#step("end");
    this.#rest();
  }

  /** Stop all timers. */
  #rest() {
    this.#over = null;
    this.#isQuiet = false;
    this.#quietAt = Infinity;
  }

  ended() {
    this.#end();
  }

  /** Note that the connection is lost. @param {import("./errors.js").TailraceError} error @param
   * {number} now
   */
  lost(error, now) {
    if (!TABLE[this.state].lost) return; // there is no connection
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

  /** Handle the timer, which may be late. @param {number} now */
  tick(now) {
    if (now >= this.#quietAt) {
      // Frames may have come that were not handled.
      this.#isQuiet = !(now - this.#quietAt > FROZEN_MS || this.full);
      this.#quietAt = this.#isQuiet ? Infinity : now + QUIET_MS;
    }
    if (this.#over === null || now < this.#over) return;
    if (this.state === "waiting") this.start(now);
    else if (now - this.#over > FROZEN_MS) this.alive(now);
    else if (this.full && this.#step("suspend")) this.#rest();
    else this.lost(broken("silent", "the connection is silent"), now);
  }

  /** Stop waiting: the network is back, or the page is visible again.
   * @param {number} now
   */
  wake(now) {
    if (this.state !== "waiting") return;
    this.#over = Math.max(now, this.#notBefore);
    this.tick(now);
  }

  /** Stop reading. Frames that were not taken are read again later. */
  detach() {
    if (!this.#step("detach")) return;
    this.#rest();
    this.nextIndex = this.taken;
    this.#queue = [];
    this.#queuedBytes = 0;
  }

  // ---- state ----

  /** True if the stream is open and has had frames, but none for QUIET_MS. */
  get quiet() {
    return this.state === "open" && this.#isQuiet;
  }

  /** The time at which the timer should fire. @returns {number | null} */
  get due() {
    return this.#over === null ? null : Math.min(this.#over, this.#quietAt);
  }

  /** Return the next frame, if it has come. */
  take() {
    const head = this.#queue.shift();
    if (head) this.#queuedBytes -= head.size;
    return head?.frame;
  }

  /** The index of the first frame that was not taken. */
  get taken() {
    const head = this.#queue[0];
    return head ? firstOf(head.frame) : this.nextIndex;
  }

  /** True if no more should be read before a frame is taken. */
  get full() {
    return this.#queue.length >= WINDOW_FRAMES || this.#queuedBytes >= WINDOW_BYTES;
  }

  /** The credit of the server on this connection, absolute as in a Credit frame.
   * @returns {Allowance}
   */
  get allowance() {
    return {
      limit: this.taken + WINDOW_FRAMES,
      bytes: this.#receivedBytes + Math.max(0, WINDOW_BYTES - this.#queuedBytes),
    };
  }
}
