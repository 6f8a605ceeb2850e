/** The readers of one stream and their positions. A live reader is one whose replay has reached the
 * tip.
 *
 * A reader holds no frames: it takes them from memory at the tip, or from the log. The stream is
 * read from the edge behind only as fast as the furthest reader takes it, so that no frames pile
 * up.
 */

import type { TailraceError } from "./errors";
import { type FrameRun, partOf } from "./frames";
import type { Log } from "./log";

/** Maximum bytes by which the stored log may be ahead of the furthest reader. */
const AHEAD_BYTES = 64 << 10;
/** Maximum bytes of one write to a client. If the client does not read, they stay in memory. */
const PART_BYTES = 16 << 10;

export class Reader {
  /** Called when there are more frames, or the reader has been removed. */
  wake: (() => void) | null = null;

  constructor(public next: number) {}
}

export class Readers {
  readonly #log: Log;
  readonly #readers = new Set<Reader>();
  /** The latest frames, for readers at the tip. */
  #recent: FrameRun[] = [];
  #recentBytes = 0;
  /** Frames before this index are durable and may be sent. */
  #released: number;
  #room: (() => void) | null = null;
  /** The error after which the stream cannot be read any further, or null. */
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

  /** Return the frames to send to the reader now, or null if there are none. */
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

  /** Note that these frames are durable, and wake the readers. */
  release(run: FrameRun): void {
    this.#released = run.next;
    this.#recent.push(run);
    this.#recentBytes += run.bytes.length;
    this.#trim();
    this.wakeAll();
  }

  /** Drop frames from memory that all readers have, or that only stalled readers still need. */
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

  /** Report to all readers the error after which the stream cannot be read any further. */
  fail(error: TailraceError): void {
    this.failure = error;
    this.wakeAll();
  }

  wakeAll(): void {
    for (const reader of this.#readers) reader.wake?.();
    this.#tellOfRoom();
  }

  /** Wait until more of the stream should be read, or it has no reader any more. */
  async room(): Promise<void> {
    while (this.count > 0 && !this.#hasRoom()) {
      await new Promise<void>((resolve) => (this.#room = resolve));
    }
  }

  /** Return true if the furthest reader is near the tip. */
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
