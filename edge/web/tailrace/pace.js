// The reader's controls of a stream's pace: pause, speed and granularity, with timers and credit.
//
// A paused or slow reader takes no more frames than it can show soon. The client then stops giving
// credit, so that the server may slow down or pause the generation. It is a module of its own, so that
// pages without these controls do not load it.

import { Pacer } from "./pacer.js";

export { GRANULARITIES, Pacer } from "./pacer.js";

/** @typedef {import("./stream.js").Stream} Stream */
/** @typedef {import("./core.js").StreamFrame} StreamFrame */
/** @typedef {import("./pacer.js").Granularity} Granularity */

/**
 * @typedef {object} PaceSystem the functions of the platform that a pace uses
 * @property {() => number} now a monotonic clock in milliseconds
 * @property {(ring: () => void, ms: number) => unknown} setTimer
 * @property {(timer: any) => void} clearTimer
 */

/** Maximum text that has arrived and is not shown before reading stops, in UTF-16 code units. It is
 * longer than any unit, so a unit is always complete before reading stops.
 */
export const MOST_BEHIND_CHARS = 4_096;

/** @type {PaceSystem} */
const platform = {
  now: () => performance.now(),
  setTimer: (ring, ms) => setTimeout(ring, ms),
  clearTimer: (timer) => clearTimeout(timer),
};

/** The settings of one reader, and what is shown of the stream that is read now. */
export class Pace {
  #wordsPerMinute;
  /** @type {Granularity} */
  #granularity;
  #locale;
  #system;
  #pacer;
  #isPaused = false;
  /** @type {unknown} */
  #timer = null;
  /** @type {(() => void)[]} */
  #waiting = [];
  /** @type {Set<() => void>} */
  #watchers = new Set();

  /** @param {import("./pacer.js").PacerOptions} [options] @param {PaceSystem} [system] */
  constructor({ wordsPerMinute = Infinity, granularity = "token", locale } = {}, system = platform) {
    this.#wordsPerMinute = wordsPerMinute;
    this.#granularity = granularity;
    this.#locale = locale;
    this.#system = system;
    this.#pacer = this.#newPacer();
  }

  // ---- for the reader ----

  /** The text that is shown: a prefix of what has arrived. */
  get visible() {
    return this.#pacer.visible;
  }

  get isPaused() {
    return this.#isPaused;
  }

  /** True if the stream is complete and all of it is shown. */
  get isDone() {
    return this.#pacer.isDone;
  }

  get wordsPerMinute() {
    return this.#wordsPerMinute;
  }

  /** @param {number} wordsPerMinute Infinity shows text as it arrives */
  set wordsPerMinute(wordsPerMinute) {
    this.#pacer.setSpeed(wordsPerMinute, this.#system.now());
    this.#wordsPerMinute = wordsPerMinute;
    this.#changed();
  }

  get granularity() {
    return this.#granularity;
  }

  /** @param {Granularity} granularity */
  set granularity(granularity) {
    this.#pacer.setGranularity(granularity, this.#system.now());
    this.#granularity = granularity;
    this.#changed();
  }

  /** Show nothing more, and read nothing more. */
  pause() {
    this.#pacer.pause(this.#system.now());
    this.#isPaused = this.#pacer.isPaused;
    this.#changed();
  }

  resume() {
    this.#pacer.resume(this.#system.now());
    this.#isPaused = false;
    this.#changed();
  }

  /** Show this stream as it arrives, whatever the settings say. They apply again to the next one. */
  release() {
    this.#pacer.release(this.#system.now());
    this.#isPaused = false;
    this.#changed();
  }

  /** Call `act` whenever more is shown, or a setting changes. Return a function that stops this.
   * @param {() => void} act
   */
  watch(act) {
    this.#watchers.add(act);
    return () => void this.#watchers.delete(act);
  }

  // ---- for what reads the stream ----

  /** Begin with another stream. `shown` is its text that is shown already. @param {string} [shown] */
  begin(shown = "") {
    const now = this.#system.now();
    this.#pacer = this.#newPacer();
    this.#pacer.feed(shown, now);
    this.#pacer.catchUp(now);
    if (this.#isPaused) this.#pacer.pause(now);
    this.#changed();
  }

  /** Take the whole text so far. @param {string} text */
  feed(text) {
    this.#pacer.feed(text, this.#system.now());
    this.#changed();
  }

  /** Show at once what has arrived. */
  catchUp() {
    this.#pacer.catchUp(this.#system.now());
    this.#changed();
  }

  /** Note that the stream has ended. */
  end() {
    this.#pacer.end(this.#system.now());
    this.#changed();
  }

  /** True if the reader should take more frames. */
  get hasRoom() {
    return !this.#isPaused && this.#pacer.behind < MOST_BEHIND_CHARS;
  }

  /** Wait until the next change of what is shown, or of a setting. @returns {Promise<void>} */
  change() {
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  /** Wait until the reader should take more frames of the stream. A connection that the server closed
   * meanwhile, because nothing was read, is opened again.
   * @param {Pick<Stream, "state" | "error" | "reconnect">} reading
   */
  async room(reading) {
    if (this.hasRoom) return;
    while (!this.hasRoom) await this.change();
    if (reading.state === "failed" && reading.error?.retryable) reading.reconnect();
  }

  #newPacer() {
    return new Pacer({
      wordsPerMinute: this.#wordsPerMinute,
      granularity: this.#granularity,
      locale: this.#locale,
    });
  }

  #changed() {
    this.#setTimer();
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const resolve of waiting) resolve();
    for (const act of this.#watchers) act();
  }

  #setTimer() {
    this.#system.clearTimer(this.#timer);
    const { due } = this.#pacer;
    if (due === null) return;
    const ring = () => {
      this.#pacer.advance(this.#system.now());
      this.#changed();
    };
    this.#timer = this.#system.setTimer(ring, Math.max(0, due - this.#system.now()));
  }
}

/** Give the text that is to be shown, again and again, as `pace` says. It gets shorter only when a
 * revision takes text back. An error of the stream is thrown when all text before it is shown.
 * @param {Pick<Stream, "seen" | "content" | "state" | "error" | "reconnect"> & AsyncIterable<StreamFrame>} reading
 * @param {Pace} pace
 * @returns {AsyncGenerator<string, void>}
 */
export async function* paced(reading, pace) {
  const iterator = reading[Symbol.asyncIterator]();
  let isOver = false;
  let isLeft = false;
  /** @type {unknown} */
  let fault = null;
  pace.begin(reading.content);
  const read = async () => {
    try {
      for (;;) {
        await pace.room(reading);
        if (isLeft) return;
        const { value, done } = await iterator.next();
        if (isLeft) return;
        if (done) break;
        pace.feed(reading.content);
        if (value.index < reading.seen) pace.catchUp();
      }
    } catch (error) {
      fault = error;
    }
    isOver = true;
    pace.end();
  };
  read();
  let shown = "";
  try {
    while (!pace.isDone || shown !== pace.visible) {
      if (shown === pace.visible) await pace.change();
      else yield (shown = pace.visible);
    }
    if (fault) throw fault;
  } finally {
    isLeft = true;
    if (!isOver) await iterator.return?.();
  }
}
