/** Runs of raw frames. The same bytes are read from the edge behind, stored as a row, and sent to
 * readers.
 */

import { LOGGED, TAGS } from "../../edge/web/tailrace/wire.js";

/** Consecutive logged frames of one stream, without a gap, with corr (correlation id) 0. */
export interface FrameRun {
  /** The index of the first frame, and of the frame after the last one. */
  first: number;
  next: number;
  bytes: Uint8Array;
}

/** Tags of the frames that the body of a stream may have. */
export const IN_A_BODY: ReadonlySet<number> = new Set([
  ...LOGGED,
  TAGS.Heartbeat,
  TAGS.Status,
  TAGS.StreamError,
]);

export const HEADER_BYTES = 4;

/** Return the size in bytes of the frame that begins at `at`. */
export function sizeAt(bytes: Uint8Array, at: number): number {
  const low = bytes[at] ?? 0;
  const middle = bytes[at + 1] ?? 0;
  const high = bytes[at + 2] ?? 0;
  return HEADER_BYTES + low + (middle << 8) + (high << 16);
}

/** Yield the frames of a run, without checks: they were checked when the run was made. */
export function* framesOf(bytes: Uint8Array): Iterable<Uint8Array> {
  for (let at = 0; at < bytes.length; ) {
    const end = at + sizeAt(bytes, at);
    yield bytes.subarray(at, end);
    at = end;
  }
}

/** Return the part of a run from frame `from` on: about `most` bytes, and at least one frame. */
export function partOf(run: FrameRun, from: number, most: number): FrameRun {
  let start = 0;
  for (let index = run.first; index < from; index++) start += sizeAt(run.bytes, start);
  if (run.bytes.length - start <= most) {
    return { first: from, next: run.next, bytes: run.bytes.subarray(start) };
  }
  let end = start;
  let next = from;
  do {
    end += sizeAt(run.bytes, end);
    next++;
  } while (end < run.bytes.length && end - start < most);
  return { first: from, next, bytes: run.bytes.subarray(start, end) };
}

/** Return true if the last frame of the run ends the stream. */
export function isEnd(run: FrameRun): boolean {
  let last = 0;
  for (let at = 0; at < run.bytes.length; at += sizeAt(run.bytes, at)) last = at;
  return run.bytes[last + HEADER_BYTES] === TAGS.StreamEnd;
}

/** Return consecutive runs as one. */
export function joined(runs: FrameRun[]): FrameRun {
  const [first] = runs;
  const last = runs.at(-1);
  if (first === undefined || last === undefined) throw new Error("no run to join");
  if (runs.length === 1) return first;
  const bytes = new Uint8Array(runs.reduce((sum, run) => sum + run.bytes.length, 0));
  let at = 0;
  for (const run of runs) {
    bytes.set(run.bytes, at);
    at += run.bytes.length;
  }
  return { first: first.first, next: last.next, bytes };
}
