// Sends bytes to a stream whose pipeline takes input, such as the sound of a microphone.

import { system as theSystem } from "./connection.js";
import { TailraceError } from "./errors.js";
import { httpError } from "./fetch.js";
import { headersOf, partsOf, patiently } from "./stream.js";

/** @typedef {import("./stream.js").Options} StreamOptions */
/** A stream of the client, or the id and resume token of a stream.
 * @typedef {{id: string | null, token?: string | null, watch?: (act: () => void) => () => void,
 *   state?: string, error?: Error | null}} Target
 */
/** The stored input: its size in bytes, and whether it is complete.
 * @typedef {{id: string, bytes: number, complete: boolean}} Stored
 */

/** Maximum number of bytes in one request. */
const MAX_BODY_BYTES = 256 * 1024;
/** Maximum number of bytes that wait here while the network is down. */
export const MAX_WAITING_BYTES = 16 * 1024 * 1024;

/** Writes the input of one stream, in order. Bytes that were not acknowledged are sent again. */
export class InputWriter {
  #url;
  #target;
  #options;
  #system;
  /** @type {Uint8Array[]} */
  #waiting = [];
  #waitingBytes = 0;
  /** Number of stored bytes; null until the server has reported it. @type {number | null} */
  #stored = null;
  #isLast = false;
  /** @type {Promise<Stored> | null} */
  #sending = null;
  /** The error after which nothing more is sent. @type {unknown} */
  #fault = null;

  /**
   * @param {string} url the URL of streams, such as /v1/generate
   * @param {Target} target
   * @param {Pick<StreamOptions, "apiKey" | "headers" | "backoff" | "system">} [options]
   */
  constructor(url, target, options = {}) {
    [this.#url] = partsOf(url);
    this.#target = target;
    this.#options = options;
    this.#system = options.system ?? theSystem;
  }

  /** Number of bytes that wait to be sent. */
  get waiting() {
    return this.#waitingBytes;
  }

  /** Send bytes after all earlier ones. Return the stored input once it has these bytes. Throws a
   * TailraceError if they are refused, or if no edge has answered for the patience of `backoff`;
   * then a new writer continues after the bytes that are stored.
   * @param {Uint8Array} data
   * @returns {Promise<Stored>}
   */
  write(data) {
    if (this.#fault) return Promise.reject(this.#fault);
    if (this.#waitingBytes + data.length > MAX_WAITING_BYTES) {
      const hint = "wait for earlier writes";
      return Promise.reject(new TailraceError("too much input waits", { code: "input_waits", hint }));
    }
    this.#waiting.push(data);
    this.#waitingBytes += data.length;
    return (this.#sending ??= this.#send());
  }

  /** Complete the input, after all earlier bytes. @returns {Promise<Stored>} */
  close() {
    this.#isLast = true;
    return this.write(new Uint8Array());
  }

  /** Send all that waits, and what is added meanwhile. @returns {Promise<Stored>} */
  async #send() {
    try {
      const id = await this.#begun();
      this.#stored ??= (await this.#post(id, new Uint8Array(), 0, false)).bytes;
      for (;;) {
        const body = this.#next();
        const isLast = this.#isLast && !this.#waiting.length;
        const stored = await this.#post(id, body, this.#stored, isLast);
        this.#stored += body.length;
        if (!this.#waiting.length && isLast === this.#isLast) return stored;
      }
    } catch (error) {
      this.#fault = error;
      throw error;
    } finally {
      this.#sending = null;
    }
  }

  /** Take the bytes of the next request. */
  #next() {
    const parts = [];
    let size = 0;
    for (let part = this.#waiting[0]; part && (!size || size + part.length <= MAX_BODY_BYTES); part = this.#waiting[0]) {
      parts.push(part);
      size += part.length;
      this.#waiting.shift();
    }
    this.#waitingBytes -= size;
    const body = new Uint8Array(size);
    let at = 0;
    for (const part of parts) {
      body.set(part, at);
      at += part.length;
    }
    return body;
  }

  /** @param {string} id @param {Uint8Array<ArrayBuffer>} body @param {number} offset @param {boolean} last
   * @returns {Promise<Stored>}
   */
  #post(id, body, offset, last) {
    const url = `${this.#url}/${id}/input?offset=${offset}&last=${Number(last)}`;
    const { token } = this.#target;
    const headers = { ...headersOf(this.#options), ...(token ? { "Tailrace-Token": token } : {}) };
    const request = async () => {
      const response = await this.#system.fetch(url, { method: "POST", headers, body });
      if (!response.ok) throw await httpError(response);
      return response.json();
    };
    return patiently(request, url, this.#system, this.#options.backoff);
  }

  /** Return the id of the stream, when it has begun. */
  async #begun() {
    for (;;) {
      const { id, state = "", error, watch } = this.#target;
      if (id) return id;
      if (!watch || ["failed", "detached"].includes(state)) {
        throw error ?? new TailraceError("the stream never began", { code: "not_found" });
      }
      await new Promise((resolve) => {
        const stop = this.#target.watch?.(() => {
          stop?.();
          resolve(null);
        });
      });
    }
  }
}
