// Chooses the transport of a stream, and remembers for each edge which one works.

import { broken } from "./errors.js";
import { byFetch } from "./fetch.js";

/** @typedef {"fetch" | "websocket"} Transport */
/** @typedef {import("./connection.js").Connect} Connect */

/** Maximum size of a message to the server. */
const MAX_MESSAGE_BYTES = 65_536;

/** Read over a WebSocket. The code for it is loaded when the first one is opened.
 * @type {Connect}
 */
function bySocket(asked, system, report) {
  let isClosed = false;
  /** @type {import("./connection.js").Connection | null} */
  let loaded = null;
  import("./socket.js")
    .then((module) => {
      if (!isClosed) loaded = module.bySocket(asked, system, report);
    })
    .catch((error) => report.lost(error.code ? error : broken("not_loaded", String(error), error)));
  return {
    allow: (allowance) => loaded?.allow(allowance),
    close(isSilent) {
      isClosed = true;
      loaded?.close(isSilent);
    },
  };
}

export const CONNECT = { fetch: byFetch, websocket: bySocket };
/** Number of streams read by fetch from which on new streams use a WebSocket. Over HTTP/1.1 a browser
 * opens only six connections to a server, and a page cannot know whether it uses HTTP/1.1.
 */
const MANY = 4;
/** Number of failures in a row after which the other transport is tried. */
const TRIES = 2;

/** The transport that worked after the first choice failed, by origin. @type {Map<string,
 * Transport>}
 */
const remembered = new Map();
/** The number of streams that are read by fetch, by origin. @type {Map<string, number>} */
const underWay = new Map();

/** @param {string} origin @param {number} change */
export function countFetches(origin, change) {
  const count = (underWay.get(origin) ?? 0) + change;
  if (count) underWay.set(origin, count);
  else underWay.delete(origin);
}

/** @param {string} origin @returns {Transport} */
const first = (origin) =>
  remembered.get(origin) ?? ((underWay.get(origin) ?? 0) < MANY ? "fetch" : "websocket");

/** @param {string} origin @param {number} failures @param {boolean} hasSockets
 * @param {number} requestBytes
 * @returns {Transport}
 */
export function choose(origin, failures, hasSockets, requestBytes) {
  if (!hasSockets || requestBytes > MAX_MESSAGE_BYTES) return "fetch";
  const isOther = Math.floor(failures / TRIES) % 2 === 1;
  return (first(origin) === "fetch") === isOther ? "websocket" : "fetch";
}

/** Note that a transport delivered a frame. @param {string} origin @param {Transport} transport
 * @param {number} failures
 */
export function worked(origin, transport, failures) {
  if (failures >= TRIES) remembered.set(origin, transport);
}
