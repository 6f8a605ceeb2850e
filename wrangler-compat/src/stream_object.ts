/** The Durable Object of one stream: reads it from the edge behind, stores it, sends it to readers.
 *
 * Frames are committed in groups and released to readers when they are durable. The index of the
 * next frame is computed from the stored rows, never kept in memory. So an object that was evicted,
 * replaced or killed continues where its stored log ends.
 */

import { DurableObject } from "cloudflare:workers";

import type { Opened } from "../../edge/web/tailrace/schema.js";
import { TailraceError, errorOf, errorResponse, unreachable } from "./errors";
import { type FrameRun, joined } from "./frames";
import { Intake } from "./intake";
import { type About, Log } from "./log";
import { OPENED, headerOf, headersOf, openedOf } from "./generation";
import { Origin, forwarded } from "./origin";
import { type Reader, Readers } from "./readers";
import { FRAMES, chooseView, checkStreamId, parseAfter } from "./request";
import { type Env, retentionMs } from "./settings";
import { wait } from "./time";
import { digestOf, expiryOf } from "./token";
import { encoderOf } from "./views";

/** Time for which a stream with readers waits while the edge behind cannot be reached. */
const ORIGIN_TIMEOUT_MS = 30_000;
const LEAST_RETRY_MS = 100;
const MOST_RETRY_MS = 2_000;
/** Time for which the object goes on reading the stream after its last reader has left: the reader
 * may only have lost its connection.
 */
const LINGER_MS = 5_000;
/** Maximum time until an object that was killed while it read the stream is started again. */
const REATTACH_MS = 5_000;
/** Time without a frame after which a keep-alive is sent to a reader. */
const SILENCE_MS = 4_000;
const MAX_WAITING_BYTES = 64 << 10;
/** Maximum time for which frames wait for further frames, to be committed together. */
const MOST_GATHER_MS = 8;

/** A request to read the stream. */
interface Wanted {
  request: Request;
  id: string;
  from: number;
  token: string | null;
  /** True if the request has an API key, which only the edge behind can check. */
  hasKey: boolean;
}

export class StreamObject extends DurableObject<Env> {
  readonly #log = new Log(this.ctx.storage);
  #readers = new Readers(this.#log);
  readonly #origin = new Origin(this.env.TAILRACE_ORIGIN_URL);
  #waiting: FrameRun[] = [];
  #waitingBytes = 0;
  #commitMs = 0;
  #committing: Promise<void> | null = null;
  #reading: AbortController | null = null;

  override async fetch(request: Request): Promise<Response> {
    try {
      return await this.#read(request);
    } catch (error) {
      if (error instanceof TailraceError) return errorResponse(error);
      throw error;
    }
  }

  // ---- a reader ----

  async #read(request: Request): Promise<Response> {
    const url = new URL(request.url);
    const view = chooseView(request.headers.get("Accept"));
    const wanted: Wanted = {
      request,
      id: checkStreamId(url.pathname.split("/").at(-1) ?? ""),
      from: parseAfter(url.searchParams.getAll("after"), request.headers.get("Last-Event-ID")),
      token: request.headers.get("Tailrace-Token") ?? url.searchParams.get("token"),
      hasKey: request.headers.has("Authorization") || request.headers.has("Tailrace-Key"),
    };
    const opened = await this.#admit(wanted);
    if (opened instanceof Response) return opened;
    opened.next_index = Math.max(Number(opened.next_index), this.#log.next);
    opened.first = wanted.from;
    const headers = headersOf(opened);
    if (view === FRAMES) headers.set(OPENED, headerOf(opened));
    if (wanted.from > 0 && this.#log.ended && wanted.from >= this.#log.next) {
      this.#schedule();
      return new Response(null, { status: 204, headers });
    }
    headers.set("Content-Type", view);
    const reader = this.#readers.enter(wanted.from);
    request.signal.addEventListener("abort", () => this.#left(reader));
    this.#readOn(null);
    this.#schedule();
    return new Response(this.#body(reader, encoderOf(view)), { headers });
  }

  /** Return the Opened frame for a reader, or the answer to a reader that is refused.
   *
   * The edge behind decides, because this object lacks the secret for checking tokens. It is not
   * asked about a token that it has issued or accepted before.
   */
  async #admit(wanted: Wanted): Promise<Opened | Response> {
    const { request, id, token, hasKey, from } = wanted;
    if (request.headers.has(OPENED)) {
      const opened = openedOf(request.headers);
      await this.#note(opened, null, false);
      return opened;
    }
    const isThere = from <= this.#log.next;
    if (token && !hasKey && isThere) {
      if (this.#log.knows(await digestOf(token), Date.now())) return this.#known(token);
    }
    // If nothing reads the stream now, the answer to this request can feed the log: it then asks
    // for the frames after the stored ones.
    const isOurs = this.#reading === null && !this.#log.ended && isThere;
    let answer: Response;
    try {
      answer = await this.#origin.ask(
        this.#urlOf(id, isOurs ? this.#log.next : isThere ? 0 : from),
        { headers: asFrames(forwarded(request), token) },
      );
    } catch (error) {
      if (!token && !hasKey && isThere && this.#log.about?.open) return this.#known("");
      throw error;
    }
    if (answer.status !== 200) return answer;
    const opened = openedOf(answer.headers);
    await this.#note(opened, token, !token && !hasKey);
    if (isOurs && this.#reading === null) this.#readOn(answer);
    else await answer.body?.cancel();
    return opened;
  }

  /** Return the Opened frame for a reader that was accepted without asking the edge behind. */
  #known(token: string): Opened {
    const about = this.#log.about;
    if (about === undefined) throw new Error("an object without a stream knows no tokens");
    return { ...about.opened, token, siblings: [], next_index: this.#log.next, first: 0 };
  }

  /** Store the facts in Opened and the valid tokens: `shown`, the reader's, and the new one in
   * Opened. `open` is true if a reader without a token or key was accepted.
   */
  async #note(opened: Opened, shown: string | null, open: boolean): Promise<void> {
    const tokens = [shown ?? "", opened.token].filter((token) => token !== "");
    const digests = await Promise.all(tokens.map(digestOf));
    const before = this.#log.about;
    this.#log.note({
      opened: { ...opened, token: "", siblings: [], next_index: 0 },
      token: opened.token || before?.token || "",
      open: open || before?.open || false,
      reading: before?.reading ?? false,
    });
    tokens.forEach((token, nth) => this.#log.remember(digests[nth] ?? "", expiryOf(token)));
  }

  #body(reader: Reader, encoder: ReturnType<typeof encoderOf>): ReadableStream<Uint8Array> {
    const readers = this.#readers;
    const left = (): void => this.#left(reader);
    let over = false;
    return new ReadableStream<Uint8Array>(
      {
        pull: async (controller) => {
          for (;;) {
            const run = readers.take(reader);
            if (run !== null) {
              over = this.#log.ended && run.next === this.#log.next;
              controller.enqueue(encoder.frames(run));
            } else if (readers.failure !== null) {
              over = true;
              controller.enqueue(encoder.failure(readers.failure));
            } else if (!(await moreCame(reader))) {
              controller.enqueue(encoder.keepAlive());
            } else if (readers.has(reader)) {
              continue;
            } else {
              over = true;
            }
            if (over) {
              left();
              controller.close();
            }
            return;
          }
        },
        cancel: left,
      },
      { highWaterMark: 0 },
    );
  }

  #left(reader: Reader): void {
    if (!this.#readers.has(reader)) return;
    if (this.#readers.count > 1 || this.#log.ended) this.#readers.leave(reader);
    else this.#linger(reader);
  }

  /** Remove the last reader only after LINGER_MS. Until then it counts as a stalled reader. */
  #linger(reader: Reader): void {
    setTimeout(() => {
      this.#readers.leave(reader);
      if (this.#readers.count === 0) this.#stop();
    }, LINGER_MS);
  }

  // ---- the origin ----

  #urlOf(id: string, from: number): URL {
    const url = this.#origin.url(`/v1/generate/${id}`);
    if (from > 0) url.searchParams.set("after", String(from - 1));
    return url;
  }

  /** Start to read the stream from the edge behind, unless it is being read. `answer` is the answer
   * with the rest of the stream, or null to request it. */
  #readOn(answer: Response | null): void {
    const about = this.#log.about;
    if (this.#reading !== null || this.#log.ended || about === undefined) return;
    this.#reading = new AbortController();
    this.#readers.failure = null;
    this.#log.note({ ...about, reading: true });
    this.ctx.waitUntil(this.#follow(about, this.#reading.signal, answer));
  }

  #stop(): void {
    this.#reading?.abort();
  }

  async #follow(about: About, signal: AbortSignal, answer: Response | null): Promise<void> {
    let lostMs: number | null = null;
    let failures = 0;
    let rest = answer;
    while (!signal.aborted && !this.#log.ended) {
      const before = this.#log.next;
      try {
        rest ??= await this.#origin.ask(this.#urlOf(about.opened.stream, this.#log.next), {
          headers: asFrames(new Headers(), about.token),
          signal,
        });
        await this.#take(rest, signal);
      } catch (error) {
        if (isFinal(error)) {
          this.#readers.fail(error);
          break;
        }
      }
      rest = null;
      if (this.#log.next > before) {
        lostMs = null;
        failures = 0;
      }
      if (this.#log.ended || signal.aborted) break;
      lostMs ??= Date.now();
      if (Date.now() - lostMs >= ORIGIN_TIMEOUT_MS) {
        this.#readers.fail(unreachable("this edge has no link to an origin"));
        break;
      }
      const most = Math.min(MOST_RETRY_MS, LEAST_RETRY_MS * 2 ** ++failures);
      await wait(LEAST_RETRY_MS + Math.random() * (most - LEAST_RETRY_MS));
    }
    this.#reading = null;
    if (signal.aborted && this.#readers.count > 0) {
      this.#readOn(null); // a new reader arrived after the reading was aborted
      return;
    }
    this.#log.note({ ...(this.#log.about ?? about), reading: false });
    this.#schedule();
  }

  /** Read an answer to its end. Throws the error that it reports. */
  async #take(answer: Response, signal: AbortSignal): Promise<void> {
    if (answer.status !== 200 || answer.body === null) throw await errorOf(answer);
    const source = answer.body.getReader();
    const stop = (): void => void source.cancel().catch(() => {});
    signal.addEventListener("abort", stop);
    try {
      const intake = new Intake(this.#log.next);
      while (intake.closing === null) {
        await this.#readers.room();
        if (this.#waitingBytes >= MAX_WAITING_BYTES) await this.#committing;
        const { done, value } = await source.read();
        if (done) break;
        const run = intake.feed(value);
        if (run !== null) this.#commit(run);
      }
      await this.#committing;
      if (intake.closing instanceof TailraceError) throw intake.closing;
    } finally {
      signal.removeEventListener("abort", stop);
      stop();
      await this.#committing;
    }
  }

  // ---- the log ----

  #commit(run: FrameRun): void {
    this.#waiting.push(run);
    this.#waitingBytes += run.bytes.length;
    this.#committing ??= this.#commitAll();
  }

  /** Commit the frames that have arrived since the last commit, until there are none. */
  async #commitAll(): Promise<void> {
    try {
      while (this.#waiting.length > 0) await this.#commitWaiting();
    } catch (error) {
      console.error(error);
      this.ctx.abort("the storage refused a write"); // a new object continues from the rows
    }
    this.#committing = null; // no await since the loop ended, so no frame can have been added
  }

  async #commitWaiting(): Promise<void> {
    await this.#gathered();
    const runs = this.#waiting;
    this.#waiting = [];
    this.#waitingBytes = 0;
    const begun = Date.now();
    this.ctx.storage.transactionSync(() => this.#log.append(runs));
    await this.ctx.storage.sync();
    this.#commitMs = Date.now() - begun;
    this.#readers.release(joined(runs));
  }

  /** Wait about as long as the last commit took. The runtime delivers one chunk of a body per turn
   * of the event loop. So frames that have already arrived get into the same commit.
   */
  async #gathered(): Promise<void> {
    const begun = Date.now();
    do await wait(0);
    while (Date.now() - begun < Math.min(this.#commitMs, MOST_GATHER_MS));
  }

  // ---- time ----

  /** Set the alarm. It starts an object again that was killed while it read the stream, or removes
   * a stream that is no longer used.
   */
  #schedule(): void {
    const inMs = this.#reading === null ? retentionMs(this.env) : REATTACH_MS;
    void this.ctx.storage.setAlarm(Date.now() + inMs);
  }

  /** Continue reading if the object was killed while it read; else remove a stream without use. */
  override async alarm(): Promise<void> {
    const about = this.#log.about;
    if (about === undefined) return;
    if (this.#readers.count > 0 || this.#reading !== null) {
      this.#schedule();
    } else if (about.reading && !this.#log.ended) {
      this.#linger(this.#readers.enter(this.#log.next));
      this.#readOn(null);
      this.#schedule();
    } else {
      await this.#log.forget();
      this.#readers = new Readers(this.#log);
    }
  }
}

/** Return true for an error that a retry cannot avoid. */
function isFinal(error: unknown): error is TailraceError {
  return error instanceof TailraceError && !error.retryable;
}

/** Return headers that ask for frames. The token may have come in the URL, which is not forwarded.
 */
function asFrames(headers: Headers, token: string | null): Headers {
  if (token) headers.set("Tailrace-Token", token);
  headers.set("Accept", FRAMES);
  headers.delete("Last-Event-ID");
  return headers;
}

/** Wait until the reader is woken. Return false if it was not woken within SILENCE_MS. */
async function moreCame(reader: Reader): Promise<boolean> {
  let timer = 0;
  const came = await new Promise<boolean>((resolve) => {
    timer = setTimeout(() => resolve(false), SILENCE_MS);
    reader.wake = () => resolve(true);
  });
  clearTimeout(timer);
  reader.wake = null;
  return came;
}
