// A stream in a component of React: its text so far, its state, and what can be done with it.

import { useEffect, useReducer, useRef } from "react";

/** @typedef {import("./stream.js").Stream} Stream */

/**
 * @typedef {object} Reading
 * @property {string} text as it is so far
 * @property {import("./core.js").State} state
 * @property {unknown} error why it `failed`, or waits
 * @property {import("./schema.js").StreamEnd | null} end
 * @property {() => void} cancel ends it for everybody
 * @property {() => void} reconnect begins to read again, after it failed
 */

/** What one component follows. `text` outlives what failed, and `leaving` a second mount. */
class Followed {
  /** @type {unknown} */
  fault = null;
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
      this.fault = error;
    }
    forget();
    changed();
  }
}

/** Reads a stream that an event's handler began, or `resume` found: `useState(() => resume(…))`.
 *
 * A component that goes detaches it, and never cancels. A hook that began streams by itself would
 * begin two wherever React mounts twice.
 * @param {Stream | null} reading
 * @param {(reading: Stream) => AsyncIterable<string>} [texts] `smooth`, for an even pace
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
      if (reading.state === "detached") reading.reconnect(); // another component has gone
      own.follow(texts);
    }
    clearTimeout(own.leaving);
    const { current } = followed;
    return () => {
      // Under StrictMode the same component mounts again at once: then nothing has happened.
      if (current) current.leaving = setTimeout(() => reading.detach());
    };
  }, [reading]);

  const own = followed.current?.reading === reading ? followed.current : null;
  return {
    text: own?.text ?? "",
    state: reading?.state ?? "idle",
    error: own?.fault ?? reading?.error ?? null,
    end: reading?.end ?? null,
    cancel: () => void reading?.cancel().catch(() => {}), // how it ended, its frames tell
    reconnect() {
      reading?.reconnect();
      own?.follow(texts);
    },
  };
}
