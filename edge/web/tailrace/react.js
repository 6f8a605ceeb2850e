// A React hook for a stream: its text so far, its state, and its controls.

import { useEffect, useReducer, useRef } from "react";
import { TailraceError } from "./errors.js";

/** @typedef {import("./stream.js").Stream} Stream */

/** @typedef {import("./stream.js").Status} Status */

/**
 * @typedef {object} Reading
 * @property {string} text the text so far
 * @property {import("./core.js").State} state of the connection: it may have `ended` before all of
 *   the text is shown
 * @property {boolean} quiet true if the stream is open and has had frames, but none for 2 s
 * @property {TailraceError | null} error the reason why it `failed` or waits
 * @property {import("./schema.js").StreamEnd | null} end the last frame, once `text` is whole
 * @property {() => Promise<Status | undefined>} cancel ends the stream for all readers
 * @property {(text: string) => Promise<Status | undefined>} steer inserts a text to continue from
 * @property {() => void} reconnect reads again after a failure
 */

/** The stream that a component shows. `text` is kept after a failure. */
class Followed {
  /** @type {TailraceError | null} */
  fault = null;
  /** Known when all of the text has been shown. @type {import("./schema.js").StreamEnd | null} */
  end = null;
  /** @type {any} */
  leaving = null;

  /** @param {Stream} reading @param {() => void} changed */
  constructor(reading, changed) {
    this.reading = reading;
    this.text = reading.content;
    this.changed = changed;
  }

  /** @param {((reading: Stream) => AsyncIterable<string>) | undefined} texts */
  async follow(texts) {
    const { reading, changed } = this;
    const forget = reading.watch(changed);
    this.fault = null;
    try {
      if (texts) {
        for await (this.text of texts(reading)) changed();
      } else {
        for await (const _ of reading) {
          this.text = reading.content;
          changed();
        }
      }
    } catch (error) {
      this.fault =
        error instanceof TailraceError ? error : new TailraceError(String(error), { cause: error });
    }
    if (!this.fault) this.end = reading.end;
    forget();
    changed();
  }
}

/** Show a stream that an event handler began, or that `resume` found: `useState(() => resume(…))`.
 *
 * A component that is unmounted detaches the stream and never cancels it. A hook that began streams
 * itself would begin two where React mounts twice.
 * @param {Stream | null} reading
 * @param {(reading: Stream) => AsyncIterable<string>} [texts] `smooth` for an even pace
 * @returns {Reading}
 */
export function useStream(reading, texts) {
  const [, render] = useReducer((/** @type {number} */ count) => count + 1, 0);
  const followed = useRef(/** @type {Followed | null} */ (null));

  useEffect(() => {
    if (!reading) return undefined;
    let own = followed.current;
    if (own?.reading !== reading) {
      own = followed.current = new Followed(reading, render);
      if (reading.state === "detached") reading.reconnect(); // by a component that was unmounted
      own.follow(texts);
    }
    clearTimeout(own.leaving);
    const { current } = followed;
    return () => {
      // Under StrictMode the same component mounts again at once, and the stream is kept.
      if (current) current.leaving = setTimeout(() => reading.detach());
    };
  }, [reading]);

  const own = followed.current?.reading === reading ? followed.current : null;
  return {
    text: own?.text ?? "",
    state: reading?.state ?? "idle",
    error: own?.fault ?? reading?.error ?? null,
    quiet: reading?.quiet ?? false,
    end: own?.end ?? null,
    cancel: async () => reading?.cancel(),
    steer: async (text) => reading?.steer(text),
    reconnect() {
      reading?.reconnect();
      own?.follow(texts);
    },
  };
}
