/** One stream at the edge: its log, its readers, and the reading of it at the origin.
 *
 * Frames that come are committed in groups, and released to readers when they are durable. What
 * comes next follows from the rows, never from memory: an object that was evicted, replaced or
 * killed takes the origin's stream up where its log ends.
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

/** How long a stream that is being read waits for an origin that is lost. */
const ORIGIN_PATIENCE_MS = 30_000;
const LEAST_RETRY_MS = 100;
const MOST_RETRY_MS = 2_000;
/** The stream is read on for so long after its last reader, who may only have lost its connection. */
const LINGER_MS = 5_000;
/** An object that was killed while it read is woken after at most so long. */
const REATTACH_MS = 5_000;
/** After this long without a frame a body gets a sign of life. */
const SILENCE_MS = 4_000;
const MAX_WAITING_BYTES = 64 << 10;
/** The longest that frames wait for others to be committed with. */
const MOST_GATHER_MS = 8;

/** A request to read, as the object looks at it. */
interface Wanted {
  request: Request;
  id: string;
  from: number;
  token: string | null;
  /** There is an API key, whose worth only the origin knows. */
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

  /** What the reader is told of the stream, or the answer to one who is not let in.
   *
   * Asked is the origin, unless the token is one that it has made or let in: no secret is here.
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
    // The answer to who reads where the log ends is what is to be read next.
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

  /** Of a stream that is here, to somebody whom the origin was not asked about. */
  #known(token: string): Opened {
    const about = this.#log.about;
    if (about === undefined) throw new Error("nobody is known where nothing is");
    return { ...about.opened, token, siblings: [], next_index: this.#log.next };
  }

  /** Who asked with `shown` was let in, or whoever asks, and has now the token that Opened says. */
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
              controller.enqueue(encoder.signOfLife());
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

  /** The last reader stays as if it read no further, for a while. */
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

  /** Read the stream at the origin, unless that is under way; `answer` is its rest, if it is here. */
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
      if (Date.now() - lostMs >= ORIGIN_PATIENCE_MS) {
        this.#readers.fail(unreachable("this edge has no link to an origin"));
        break;
      }
      const most = Math.min(MOST_RETRY_MS, LEAST_RETRY_MS * 2 ** ++failures);
      await wait(LEAST_RETRY_MS + Math.random() * (most - LEAST_RETRY_MS));
    }
    this.#reading = null;
    if (signal.aborted && this.#readers.count > 0) {
      this.#readOn(null); // somebody has come meanwhile
      return;
    }
    this.#log.note({ ...(this.#log.about ?? about), reading: false });
    this.#schedule();
  }

  /** Until the answer ends. Throws what the origin says that is no frame. */
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

  /** What has come since the last commit is one commit: what waits for it is seen after it. */
  async #commitAll(): Promise<void> {
    try {
      while (this.#waiting.length > 0) await this.#commitWaiting();
    } catch (error) {
      console.error(error);
      this.ctx.abort("the storage refused a write"); // the next object knows what was written
    }
    this.#committing = null; // in the turn that found nothing waiting: what comes next begins anew
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

  /** Frames that are here, but come one a turn, are to be in one commit: as long as the last took. */
  async #gathered(): Promise<void> {
    const begun = Date.now();
    do await wait(0);
    while (Date.now() - begun < Math.min(this.#commitMs, MOST_GATHER_MS));
  }

  // ---- time ----

  /** The one alarm: for an object that is killed while it reads, or for what nobody uses. */
  #schedule(): void {
    const inMs = this.#reading === null ? retentionMs(this.env) : REATTACH_MS;
    void this.ctx.storage.setAlarm(Date.now() + inMs);
  }

  /** Where an object was killed that read, it reads on; what nobody has used goes. */
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

/** What asking again would not cure. */
function isFinal(error: unknown): error is TailraceError {
  return error instanceof TailraceError && !error.retryable;
}

/** The token may have been said in the URL, which does not go on. */
function asFrames(headers: Headers, token: string | null): Headers {
  if (token) headers.set("Tailrace-Token", token);
  headers.set("Accept", FRAMES);
  headers.delete("Last-Event-ID");
  return headers;
}

/** Whether there is something new, before the silence gets too long. */
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
