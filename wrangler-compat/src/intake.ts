/** Parses the body of a stream: takes bytes in chunks of any size, returns runs of frames to store.
 *
 * Nearly all frames are Tokens, and frames are stored as the bytes that arrived. So Tokens are
 * checked without decoding them, and a run is a view of those bytes. The codec decodes all other
 * frames.
 */

import {
  FrameError,
  LOGGED,
  MAX_FRAME_BYTES,
  Splitter,
  TAGS,
  decode,
} from "../../edge/web/tailrace/wire.js";
import { TailraceError } from "./errors";
import { type FrameRun, HEADER_BYTES, IN_A_BODY, joined, sizeAt } from "./frames";

const VERSION_AT = 3;
const TAG_AT = 4;
const TEXT_AT = 9;
const VERSION_WITHOUT_FLAGS = 1;
const NOTHING = new Uint8Array();

export class Intake {
  #rest: Uint8Array = NOTHING;
  #next: number;
  /** "ended" after the last frame of the body, or the error with which the body ended. */
  closing: TailraceError | "ended" | null = null;

  constructor(next: number) {
    this.#next = next;
  }

  /** Return the logged frames that these bytes complete, if any. Throws FrameError for other bytes.
   */
  feed(bytes: Uint8Array): FrameRun | null {
    const data = this.#rest.length === 0 ? bytes : withRest(this.#rest, bytes);
    const runs: FrameRun[] = [];
    let first = this.#next;
    let start = 0;
    let at = 0;
    const keep = (end: number): void => {
      if (end > start) runs.push({ first, next: this.#next, bytes: data.subarray(start, end) });
    };
    while (data.length - at > HEADER_BYTES && this.closing === null) {
      const end = at + sizeAt(data, at);
      if (!isPlain(data, at, end)) refuse(data, at);
      if (end > data.length) break;
      if (data[TAG_AT + at] === TAGS.Token && indexOfToken(data, at, end) === this.#next) {
        this.#next++;
      } else if (LOGGED.has(data[TAG_AT + at] ?? -1)) {
        this.#logged(data.slice(at, end));
      } else {
        keep(at);
        this.#unlogged(data.slice(at, end));
        start = end;
        first = this.#next;
      }
      at = end;
    }
    keep(at);
    this.#rest = at < data.length ? data.slice(at) : NOTHING;
    return runs.length > 0 ? joined(runs) : null;
  }

  #logged(raw: Uint8Array): void {
    const { frame } = decode(raw);
    const index = "index" in frame ? Number(frame.index) : -1;
    if (index !== this.#next) {
      throw new FrameError(`index ${index} where ${this.#next} is next`, `${frame.type}.index`, 0);
    }
    this.#next++;
    if (frame.type === "StreamEnd") this.closing = "ended";
  }

  #unlogged(raw: Uint8Array): void {
    const { frame } = decode(raw);
    if (frame.type === "Status") this.closing = "ended";
    if (frame.type === "StreamError") {
      const retryAfterMs = frame.retry_after_ms ?? null;
      this.closing = new TailraceError(frame.message, { ...frame, retryAfterMs });
    }
  }
}

/** Return true if the codec would accept the part of the frame's header that has arrived. */
function isPlain(data: Uint8Array, at: number, end: number): boolean {
  return (
    data[at + VERSION_AT] === VERSION_WITHOUT_FLAGS &&
    end - at >= TEXT_AT &&
    end - at <= HEADER_BYTES + MAX_FRAME_BYTES &&
    IN_A_BODY.has(data[at + TAG_AT] ?? -1)
  );
}

/** Decode the invalid frame at `at` with the codec, so that the codec throws its error. */
function refuse(data: Uint8Array, at: number): never {
  new Splitter({ tags: IN_A_BODY }).feed(data.slice(at));
  throw new FrameError("no frame of a stream's body", "header", 0);
}

/** Return the index of a Token from its bytes, or -1 if only the codec can read it. */
function indexOfToken(data: Uint8Array, at: number, end: number): number {
  const low = data[at + TEXT_AT] ?? 0;
  let from = at + TEXT_AT + 1 + low;
  if (low > 127) {
    const high = data[at + TEXT_AT + 1] ?? 0;
    if (high > 127) return -1;
    from = at + TEXT_AT + 2 + (low & 127) + (high << 7);
  }
  if (end - from < 1 || end - from > 4 || (data[end - 1] ?? 0) > 127) return -1;
  let index = 0;
  for (let byte = end - 1; byte >= from; byte--) index = index * 128 + ((data[byte] ?? 0) & 127);
  return index;
}

function withRest(rest: Uint8Array, bytes: Uint8Array): Uint8Array {
  const whole = new Uint8Array(rest.length + bytes.length);
  whole.set(rest);
  whole.set(bytes, rest.length);
  return whole;
}
