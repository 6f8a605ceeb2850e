// A transport for `useChat` of the AI SDK, whose answers survive a lost network and a reload.

import { chatUrl, follow, stopChat } from "./chats.js";
import { system as theSystem } from "./connection.js";
import { TailraceError, broken } from "./errors.js";
import { httpError } from "./fetch.js";
import { Stream, headersOf, patiently } from "./stream.js";
import { UiChunks } from "./ui_chunks.js";

/** @typedef {import("./ui_chunks.js").UiChunk} UiChunk */
/** @typedef {import("./stream.js").Options} StreamOptions */
/** @typedef {Pick<StreamOptions, "apiKey" | "transport" | "backoff" | "system">} Passed */
/** @typedef {Record<string, string>} RequestHeaders */

/** @template T @typedef {T | (() => T | Promise<T>)} Resolvable a value, or a function that gives it
 */

/** @typedef {object} Own
 * @property {string} [url] the URL of the edge; the page's own origin if left out
 * @property {Resolvable<RequestHeaders>} [headers] headers of every request by fetch
 * @property {Resolvable<object>} [body] fields to send besides the messages: `model`, `max_tokens`, …
 * @property {"cancel" | "leave"} [stop] the effect of the chat's `stop()`: end the generation for all
 *   readers (the default), or stop reading only
 * @property {(stream: Stream, chatId: string) => void} [onStream] called with each stream that is read
 * @property {(error: TailraceError, chatId: string) => void} [onStopError] called when a generation
 *   could not be cancelled; logged if left out
 */

/** @typedef {Own & Passed} Options */

/** The answer of a chat that is being read, or was read last. `begun` is resolved when the id of its
 * stream is known, or will never be.
 * @typedef {{stream: Stream | null, isSuperseded: boolean, begun: Promise<void>, begin: () => void}} Answer
 */

/** @typedef {object} Following
 * @property {(turn: import("./chats.js").Turn) => void} [onTurn] called with each turn that this page
 *   neither began nor reads: call `resumeStream()` of the chat to read it
 * @property {(readers: number) => void} [onPresence] called with the number of pages that follow the
 *   chat, when it changes
 * @property {AbortSignal} [signal] ends the subscription
 */

/**
 * @typedef {object} Reconnecting
 * @property {string} chatId
 * @property {AbortSignal} [abortSignal]
 * @property {RequestHeaders | Headers} [headers] headers besides those of the options
 */

/**
 * @typedef {object} OfMessages
 * @property {readonly object[]} messages the messages of the chat
 * @property {string} trigger
 * @property {string} [messageId]
 * @property {object} [body] fields besides those of the options
 */

/** @typedef {Reconnecting & OfMessages} Sending */

/** A `ChatTransport` that reads the answers of /api/chat of an edge as streams of frames.
 *
 * It reconnects after a broken connection and continues with the next frame. It needs no
 * code of the package `ai`, and its types fit the ChatTransport of `ai` 6 and 7.
 */
export class TailraceChatTransport {
  /** Tells the AI SDK that a stream it resumes comes from its start, and replaces the message. */
  resumeStreamIsReplay = true;

  #options;
  #system;
  #url;
  /** @type {Map<string, Answer>} */
  #answers = new Map();

  /** @param {Options} [options] */
  constructor(options = {}) {
    this.#options = options;
    this.#system = options.system ?? theSystem;
    this.#url = (options.url ?? "").replace(/\/+$/, "");
  }

  /** Return the stream of the chat's last answer on this page, with its `id`, `state` and `cancel()`.
   * Return null if there is none yet.
   * @param {string} chatId
   */
  streamOf(chatId) {
    return this.#answers.get(chatId)?.stream ?? null;
  }

  /** @param {Sending} request @returns {Promise<ReadableStream<UiChunk>>} */
  async sendMessages({ chatId, messages, trigger, messageId, abortSignal, headers, body }) {
    const answer = this.#begin(chatId);
    try {
      const given = await this.#given(headers);
      const own = await resolved(this.#options.body);
      abortSignal?.throwIfAborted();
      const input = /** @type {any} */ ({ ...own, ...body, id: chatId, messages, trigger, messageId });
      answer.stream = new Stream(
        `${this.#url}/v1/generate`,
        { ...given, input, openUrl: `${this.#url}/api/chat` },
        this.#system,
        null,
      );
      return await this.#read(chatId, answer, answer.stream, abortSignal);
    } finally {
      answer.begin();
    }
  }

  /** @param {Reconnecting} request @returns {Promise<ReadableStream<UiChunk> | null>} */
  async reconnectToStream({ chatId, abortSignal, headers }) {
    const before = this.#answers.get(chatId);
    if (before) before.isSuperseded = true;
    const answer = this.#begin(chatId);
    try {
      const given = await this.#given(headers);
      const found = await this.#find(chatId, given, abortSignal);
      if (!found) return null;
      const url = `${this.#url}/v1/generate/${found.id}`;
      answer.stream = new Stream(url, { ...given, token: found.token }, this.#system, null);
      return await this.#read(chatId, answer, answer.stream, abortSignal);
    } finally {
      answer.begin();
    }
  }

  /** Follow a chat until `signal` is aborted: report the turns that other pages and devices begin, and
   * how many pages follow it. Throws a TailraceError if the edge refuses it or cannot be reached.
   * @param {string} chatId
   * @param {Following} following
   */
  async follow(chatId, { onTurn, onPresence, signal }) {
    const { backoff, headers } = await this.#given(undefined);
    const { apiKey } = this.#options;
    const options = { apiKey, headers, backoff, system: this.#system, signal, tail: 1 };
    for await (const event of follow(chatUrl(this.#url, chatId), options)) {
      if (event.type === "presence") onPresence?.(event.readers);
      else if (!(await this.#reads(chatId, event.stream)) && !signal?.aborted) onTurn?.(event);
    }
  }

  /** End the chat's running answer for all readers, whichever device began it. Return the turns that were
   * stopped: none if no answer was running.
   * @param {string} chatId
   */
  async stopChat(chatId) {
    const { headers } = await this.#given(undefined);
    return stopChat(chatUrl(this.#url, chatId), { apiKey: this.#options.apiKey, headers, system: this.#system });
  }

  /** Return true if this page reads or has read the stream as the chat's last answer. It waits until an
   * answer that is being requested has begun. One that was aborted before that counts as this stream.
   * @param {string} chatId
   * @param {string} stream its id
   */
  async #reads(chatId, stream) {
    await this.#answers.get(chatId)?.begun;
    const own = this.#answers.get(chatId)?.stream;
    return own?.id === stream || (own?.id === null && own.state !== "failed");
  }

  /** @param {string} chatId */
  #begin(chatId) {
    let begin = () => {};
    const begun = new Promise((/** @type {(_: void) => void} */ resolve) => (begin = resolve));
    /** @type {Answer} */
    const answer = { stream: null, isSuperseded: false, begun, begin };
    this.#answers.set(chatId, answer);
    return answer;
  }

  /** Return the options of a stream. @param {RequestHeaders | Headers | undefined} more */
  async #given(more) {
    const { apiKey, transport, backoff } = this.#options;
    const own = await resolved(this.#options.headers);
    const headers = { ...own, ...Object.fromEntries(new Headers(more)) };
    return { apiKey, transport, backoff, headers };
  }

  /** Ask the edge for the chat's latest stream. Return null if there is none.
   * @param {string} chatId
   * @param {StreamOptions} given
   * @param {AbortSignal} [signal]
   */
  async #find(chatId, given, signal) {
    const url = `${this.#url}/api/chat/${encodeURIComponent(chatId)}/stream`;
    const init = { method: "HEAD", cache: /** @type {const} */ ("no-store"), headers: headersOf(given) };
    const request = async () => {
      if (signal?.aborted) return null;
      const response = await this.#system.fetch(url, init);
      if (response.status === 204) return null;
      if (!response.ok) throw await httpError(response);
      const id = response.headers.get("Tailrace-Stream");
      if (!id) throw broken("not_frames", "something else answers in the place of an edge");
      return { id, token: response.headers.get("Tailrace-Token") ?? undefined };
    };
    const found = await patiently(request, url, this.#system, given.backoff);
    // Nothing was read yet, so an abort here cancels nothing. React causes one when it mounts a
    // component twice.
    signal?.throwIfAborted();
    return found;
  }

  /** Return the chunks of a stream's message, from its beginning. Throws the error of a refusal.
   * @param {string} chatId
   * @param {Answer} answer
   * @param {Stream} stream
   * @param {AbortSignal} [signal]
   * @returns {Promise<ReadableStream<UiChunk>>}
   */
  async #read(chatId, answer, stream, signal) {
    this.#options.onStream?.(stream, chatId);
    const frames = stream[Symbol.asyncIterator]();
    const aborted = () => {
      if (stream.id) stream.detach(); // without an id, keep reading: a cancellation needs it
      this.#stop(chatId, answer, stream);
    };
    const forget = () => signal?.removeEventListener("abort", aborted);
    if (signal?.aborted) aborted();
    else signal?.addEventListener("abort", aborted, { once: true });
    const next = async () => {
      try {
        const { value } = await frames.next();
        signal?.throwIfAborted();
        if (!value || value.type === "StreamEnd") forget();
        return value;
      } catch (error) {
        forget();
        throw error;
      }
    };
    let frame = await Promise.race([next(), ...(signal ? [abortOf(signal)] : [])]);
    const chunks = new UiChunks(stream.id ?? "");
    const waiting = chunks.begin();
    return new ReadableStream(
      {
        async pull(controller) {
          while (!waiting.length || frame) {
            if (frame) waiting.push(...chunks.add(frame, stream.content));
            frame = undefined;
            if (waiting.length) break;
            frame = await next();
            if (!frame) return controller.close();
          }
          for (const chunk of waiting.splice(0)) controller.enqueue(chunk);
        },
        cancel: () => {
          forget();
          stream.detach();
        },
      },
      { highWaterMark: 0 },
    );
  }

  /** Handle an abort: the chat does not want the answer any more.
   * @param {string} chatId
   * @param {Answer} answer
   * @param {Stream} stream
   */
  async #stop(chatId, answer, stream) {
    await null; // a chat that resumes twice aborts the first reading just before the second begins
    if (this.#options.stop !== "leave" && !answer.isSuperseded) {
      try {
        await stream.cancel();
      } catch (error) {
        const { onStopError = (/** @type {unknown} */ fault) => console.error(fault) } = this.#options;
        onStopError(/** @type {TailraceError} */ (error), chatId);
      }
    }
    stream.detach();
  }
}

/** Reject as soon as the signal is aborted. @param {AbortSignal} signal @returns {Promise<never>}
 */
const abortOf = (signal) =>
  new Promise((_, reject) => {
    if (signal.aborted) reject(signal.reason);
    else signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  });

/** @template T @param {Resolvable<T> | undefined} given */
async function resolved(given) {
  return typeof given === "function" ? /** @type {() => T | Promise<T>} */ (given)() : given;
}
