// Which transport a stream takes: the one that works, which is remembered for each edge.

import { broken } from "./errors.js";
import { byFetch } from "./fetch.js";

/** @typedef {"fetch" | "websocket"} Transport */
/** @typedef {import("./connection.js").Connect} Connect */

/** The most that a message to the server may be long. */
const MAX_MESSAGE_BYTES = 65_536;

/** The code that only WebSockets need is loaded when the first one is opened.
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
/** A browser has six connections to a server over HTTP/1.1, and does not say when it has more. */
const MANY = 4;
/** So many tries go by before the other one gets its chance. */
const TRIES = 2;

/** What worked where the first choice did not, by origin. @type {Map<string, Transport>} */
const remembered = new Map();
/** Streams that are read by fetch, by origin. @type {Map<string, number>} */
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

/** It brought something. @param {string} origin @param {Transport} transport @param {number} failures */
export function worked(origin, transport, failures) {
  if (failures >= TRIES) remembered.set(origin, transport);
}
