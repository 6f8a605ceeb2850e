// The interface between a stream and its transports: requests to a connection, and its reports.

/** Time without any bytes after which a connection counts as lost. An edge sends a keep-alive every
 * 4 to 6 s.
 */
export const SILENCE_MS = 10_000;

/**
 * @typedef {object} Asked a request for a new stream of `input`, or for the rest of the stream `id`
 * @property {string} url the URL of /v1/generate
 * @property {string} openUrl the URL that a new stream is requested at, by fetch
 * @property {string | null} id
 * @property {string | null} token the resume token that the request needs
 * @property {import("./schema.js").GenerateInput | null} input
 * @property {string} idempotencyKey
 * @property {number} nextIndex
 * @property {boolean} [snapshot] true to get the text so far as one frame
 * @property {Group} [group] how the edge groups the text
 * @property {number} [tail] the number of the newest frames to begin with
 * @property {number | string} [since] the time of the frames to begin with
 * @property {Record<string, string>} headers
 * @property {string | null} apiKey
 * @property {import("./core.js").Allowance} allowance
 */

/** A unit of text, or an object of the unit and limits.
 * @typedef {import("./schema.js").GenerateInput["group"]} Group
 */

/** @typedef {object} Report
 * @property {(about: Opening) => void} opened
 * @property {(frame: import("./schema.js").Frame, bytes: number) => void} frame
 * @property {() => void} alive
 * @property {() => void} ended the stream has ended, and no frame is left to send
 * @property {(error: import("./errors.js").TailraceError) => void} lost called once, after all other reports
 * @property {() => Promise<void>} room waits until there is room for more
 */

/** @typedef {{id: string | null, token: string | null, siblings: readonly Sibling[]}} Opening */
/** @typedef {{stream: string, token: string}} Sibling */

/**
 * @typedef {object} Connection
 * @property {number} [uploadMs] the time that sending the request may take
 * @property {(allowance: import("./core.js").Allowance) => void} allow gives credit for more frames
 * @property {(isSilent?: boolean) => void} close ends the reports; the stream itself goes on
 */

/** @typedef {(asked: Asked, system: System, report: Report) => Connection} Connect */

/** @typedef {object} System the functions of the platform that a stream uses
 * @property {typeof fetch} fetch
 * @property {typeof WebSocket | undefined} WebSocket
 * @property {() => number} now a monotonic clock in milliseconds
 * @property {() => number} random from 0 to 1
 * @property {(ring: () => void, ms: number) => any} setTimer
 * @property {(timer: any) => void} clearTimer
 * @property {(wake: () => void, cut: () => void) => () => void} onWake calls `wake` when the network
 *   is back or the page is visible again, and `cut` when the network is lost; returns a function that
 *   stops this
 */

/** The real platform. @type {System} */
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
