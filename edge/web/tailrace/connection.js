// What a connection is asked for, and what it reports: the seam between a stream and its transports.

/** Timeout for anything on a connection: an edge shows a sign of life every 4 to 6 s. */
export const SILENCE_MS = 10_000;

/**
 * @typedef {object} Asked a stream that is to be made, of `input`, or the rest of the one with `id`
 * @property {string} url of /v1/generate
 * @property {string} openUrl the URL that a new stream is requested at, by fetch
 * @property {string | null} id
 * @property {string | null} token
 * @property {import("./schema.js").GenerateInput | null} input
 * @property {string} idempotencyKey
 * @property {number} nextIndex
 * @property {Record<string, string>} headers
 * @property {string | null} apiKey
 * @property {import("./core.js").Allowance} allowance
 */

/**
 * @typedef {object} Report
 * @property {(about: Opening) => void} opened
 * @property {(frame: import("./schema.js").Frame, bytes: number) => void} frame
 * @property {() => void} alive
 * @property {() => void} ended there was nothing left to send
 * @property {(error: import("./errors.js").TailraceError) => void} lost once, and then no more
 * @property {() => Promise<void>} room waits until there is room for more
 */

/** @typedef {{id: string | null, token: string | null, siblings: readonly Sibling[]}} Opening */
/** @typedef {{stream: string, token: string}} Sibling */

/**
 * @typedef {object} Connection
 * @property {number} [uploadMs] how long the request itself may take to be sent
 * @property {(allowance: import("./core.js").Allowance) => void} allow the reader has taken frames
 * @property {(isSilent?: boolean) => void} close nothing is reported any more; the stream runs on
 */

/** @typedef {(asked: Asked, system: System, report: Report) => Connection} Connect */

/**
 * @typedef {object} System what a stream needs of the world around it
 * @property {typeof fetch} fetch
 * @property {typeof WebSocket | undefined} WebSocket
 * @property {() => number} now milliseconds that only grow
 * @property {() => number} random from 0 to 1
 * @property {(ring: () => void, ms: number) => any} setTimer
 * @property {(timer: any) => void} clearTimer
 * @property {(wake: () => void, cut: () => void) => () => void} onWake calls `wake` when the network
 *   is back or the page is seen again, and `cut` when the network goes; returns what ends that
 */

/** The one that there is. @type {System} */
export const system = {
  fetch: (...request) => fetch(...request),
  get WebSocket() {
    return globalThis.WebSocket;
  },
  now: () => performance.now(),
  random: Math.random,
  setTimer: (ring, ms) => setTimeout(ring, ms),
  clearTimer: (timer) => clearTimeout(timer),
  onWake(wake, cut) {
    const seen = () => document.visibilityState === "visible" && wake();
    globalThis.addEventListener?.("online", wake);
    globalThis.addEventListener?.("offline", cut);
    globalThis.document?.addEventListener("visibilitychange", seen);
    return () => {
      globalThis.removeEventListener?.("online", wake);
      globalThis.removeEventListener?.("offline", cut);
      globalThis.document?.removeEventListener("visibilitychange", seen);
    };
  },
};
