// Follows a chat: its turns as they begin on any device, and how many clients follow it.

import { SILENCE_MS, system as theSystem } from "./connection.js";
import { TailraceError, broken } from "./errors.js";
import { asTailraceError, httpError } from "./fetch.js";
import { Core } from "./core.js";
import { headersOf } from "./stream.js";

/** @typedef {import("./connection.js").System} System */
/** @typedef {import("./stream.js").Options} StreamOptions */
/** @typedef {{turn: number, stream: string, started_ms: number}} Turn */
/** @typedef {{type: "turn"} & Turn | {type: "presence", readers: number}} ChatEvent */

/** @typedef {object} Own
 * @property {number} [after] the number of the last turn that the reader has
 * @property {number} [tail] begin with the newest turns, this many, instead of the first one
 * @property {AbortSignal} [signal] ends the subscription
 */

/** @typedef {Own & Pick<StreamOptions, "apiKey" | "headers" | "backoff" | "system">} Options */

/** Return the URL of a chat.
 * @param {string} url of the edge, empty for the page's own
 * @param {string} chatId
 */
export const chatUrl = (url, chatId) => `${url}/v1/chats/${encodeURIComponent(chatId)}`;

/** Yield the turns of a chat as they begin, each once, and the number of readers when it changes.
 *
 * It creates the chat if there is none, reconnects when the connection breaks or is silent or the
 * network was lost, and ends when `signal` is aborted. It throws a TailraceError if it is refused, or
 * if nothing has arrived for the patience of `backoff`.
 *
 * @param {string} url of the chat, such as /v1/chats/chat-1
 * @param {Options} [options]
 * @returns {AsyncGenerator<ChatEvent, void>}
 */
export async function* follow(url, options = {}) {
  const { system = theSystem, signal } = options;
  const patience = new Core(0, system.random, options.backoff);
  let after = options.after;
  let abort = new AbortController();
  let endWait = () => {};
  const cut = () => {
    abort.abort();
    endWait();
  };
  const unlisten = system.onWake(() => {
    patience.wake(system.now());
    endWait();
  }, cut);
  signal?.addEventListener("abort", cut);
  try {
    while (!signal?.aborted) {
      patience.start(system.now());
      abort = new AbortController();
      try {
        const start = after === undefined ? (options.tail ? `&tail=${options.tail}` : "") : `&after=${after}`;
        for await (const line of lines(`${url}?turns=1${start}`, url, options, system, abort)) {
          patience.restart(system.now());
          if (line.type === "turn") after = line.turn;
          if (line.type !== "ping") yield line;
        }
        throw broken("cut_short", "the body ended too early");
      } catch (error) {
        if (signal?.aborted) return;
        if (error instanceof TailraceError && error.code === "beyond_end") {
          after = undefined; // the chat was forgotten in the meantime, and begins again
          continue;
        }
        patience.lost(asTailraceError(error, url), system.now());
        if (patience.state === "failed") throw patience.fault;
        while (patience.state === "waiting" && !signal?.aborted) {
          const wait = (patience.due ?? 0) - system.now();
          let timer;
          await new Promise((resolve) => {
            endWait = () => resolve(null);
            timer = system.setTimer(endWait, wait);
          });
          system.clearTimer(timer);
          patience.tick(system.now());
        }
      }
    }
  } finally {
    unlisten();
    signal?.removeEventListener("abort", cut);
  }
}

/** Yield the lines of one response. Throws an error if the connection breaks or is silent.
 * @param {string} url
 * @param {string} chat its URL
 * @param {Options} options
 * @param {System} system
 * @param {AbortController} abort ends the connection
 * @returns {AsyncGenerator<any, void>}
 */
async function* lines(url, chat, options, system, abort) {
  const close = () => abort.abort();
  const headers = { ...headersOf(options), Accept: "application/x-ndjson" };
  /** @param {string} target @param {string} method */
  const send = (target, method) => system.fetch(target, { method, headers, cache: "no-store", signal: abort.signal });
  let timer = system.setTimer(close, SILENCE_MS);
  try {
    let response = await send(url, "GET");
    if (response.status === 404) {
      const error = await httpError(response);
      if (error.code !== "unknown_chat") throw error;
      response = await send(chat, "PUT");
      if (response.ok) response = await send(chat + "?turns=1", "GET");
    }
    if (!response.ok) throw await httpError(response);
    if (!response.body) throw broken("no_lines", "the answer is not an edge's");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      system.clearTimer(timer);
      timer = system.setTimer(close, SILENCE_MS);
      const pieces = (rest + value).split("\n");
      rest = pieces.pop() ?? "";
      for (const piece of pieces) yield JSON.parse(piece);
    }
  } finally {
    system.clearTimer(timer);
    close();
  }
}

/** Stop the running turns of a chat, for all readers. Return them.
 * @param {string} url of the chat, such as /v1/chats/chat-1
 * @param {Options} [options]
 * @returns {Promise<(Turn & {state: string, next_index: number})[]>}
 */
export async function stopChat(url, options = {}) {
  const { system = theSystem, signal } = options;
  const response = await system.fetch(`${url}/stop`, { method: "POST", headers: headersOf(options), signal });
  if (!response.ok) throw await httpError(response);
  return (await response.json()).stopped;
}
