/** Who reads a stream, and how far each has got: live is replay that has reached the tip.
 *
 * A reader holds no frames: it takes them from the tip's memory or from the log. What is read of
 * the origin waits for the reader that is furthest: nobody's bytes pile up here or on the disk.
 */

import type { TailraceError } from "./errors";
import { type FrameRun, partOf } from "./frames";
import type { Log } from "./log";

/** How far the log may be ahead of the reader that is furthest. */
const AHEAD_BYTES = 64 << 10;
/** Of one write to a client: what a client that does not read holds here. */
const PART_BYTES = 16 << 10;

export class Reader {
  /** Who wants to be told when there is more. */
  wake: (() => void) | null = null;

  constructor(public next: number) {}
}

export class Readers {
  readonly #log: Log;
  readonly #readers = new Set<Reader>();
  /** The frames that were released last. */
  #recent: FrameRun[] = [];
  #recentBytes = 0;
  /** Frames before this one are durable, and may be seen. */
  #released: number;
  #room: (() => void) | null = null;
  /** Why nobody can read on. */
  failure: TailraceError | null = null;

  constructor(log: Log) {
    this.#log = log;
    this.#released = log.next;
  }

  get count(): number {
    return this.#readers.size;
  }

  enter(next: number): Reader {
    const reader = new Reader(next);
    this.#readers.add(reader);
    this.#tellOfRoom();
    return reader;
  }

  leave(reader: Reader): void {
    this.#readers.delete(reader);
    reader.wake?.();
  }

  has(reader: Reader): boolean {
    return this.#readers.has(reader);
  }

  /** What the reader gets now; null while there is nothing. */
  take(reader: Reader): FrameRun | null {
    if (reader.next >= this.#released) return null;
    const recent = this.#recent.find((run) => run.next > reader.next);
    const run =
      recent !== undefined && recent.first <= reader.next
        ? partOf(recent, reader.next, PART_BYTES)
        : this.#log.read(reader.next, this.#released, PART_BYTES);
    reader.next = run.next;
    this.#trim();
    return run;
  }

  /** These frames are durable. */
  release(run: FrameRun): void {
    this.#released = run.next;
    this.#recent.push(run);
    this.#recentBytes += run.bytes.length;
    this.#trim();
    this.wakeAll();
  }

  /** Kept is what a reader is about to get, and no more than a stalled one may cost. */
  #trim(): void {
    const slowest = Math.min(...this.#nexts());
    for (;;) {
      const [run] = this.#recent;
      if (run === undefined) break;
      if (run.next > slowest && this.#recentBytes <= AHEAD_BYTES) break;
      this.#recent.shift();
      this.#recentBytes -= run.bytes.length;
    }
    if (this.#room !== null && this.#hasRoom()) this.#tellOfRoom();
  }

  #nexts(): number[] {
    return Array.from(this.#readers, (reader) => reader.next);
  }

  fail(error: TailraceError): void {
    this.failure = error;
    this.wakeAll();
  }

  wakeAll(): void {
    for (const reader of this.#readers) reader.wake?.();
    this.#tellOfRoom();
  }

  /** Until the origin is to be read on, or nobody reads any more. */
  async room(): Promise<void> {
    while (this.count > 0 && !this.#hasRoom()) {
      await new Promise<void>((resolve) => (this.#room = resolve));
    }
  }

  /** Whether the reader that is furthest is near the tip. */
  #hasRoom(): boolean {
    const furthest = Math.max(...this.#nexts());
    if (furthest >= this.#released) return true;
    const [oldest] = this.#recent;
    if (oldest === undefined || oldest.first > furthest) return false;
    let ahead = 0;
    for (const run of this.#recent) if (run.next > furthest) ahead += run.bytes.length;
    return ahead < AHEAD_BYTES / 2;
  }

  #tellOfRoom(): void {
    const tell = this.#room;
    this.#room = null;
    tell?.();
  }
}
