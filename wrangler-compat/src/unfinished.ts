/** The streams that one connection has opened and not seen end.
 *
 * A connection costs nothing, the streams that it leaves behind do.
 */

/** Nobody here learns when a stream ends that the client has left: it counts for so long. */
const LEFT_COUNTS_MS = 600_000;

export class Unfinished {
  readonly #most: number;
  readonly #asked = new Map<number, number>(); // streams of each Open without an answer, by corr
  readonly #read = new Set<string>(); // on an open corr
  readonly #left: Map<string | symbol, number>; // when, the first one first; by id where known

  constructor(most: number, left: number[]) {
    this.#most = most;
    this.#left = new Map(left.map((at) => [Symbol(), at]));
  }

  /** When those were left that still count. */
  get left(): number[] {
    return [...this.#left.values()];
  }

  /** Whether so many more may be opened. */
  hasRoom(count: number, nowMs: number): boolean {
    for (const [key, at] of this.#left) {
      if (nowMs - at < LEFT_COUNTS_MS) break;
      this.#left.delete(key);
    }
    let asked = 0;
    for (const each of this.#asked.values()) asked += each;
    return asked + this.#read.size + this.#left.size + count <= this.#most;
  }

  ask(corr: number, count: number): void {
    this.#asked.set(corr, count);
  }

  /** The answer to what was asked; the siblings are on no corr. */
  opened(corr: number, stream: string, siblings: string[], nowMs: number): void {
    if (!this.#asked.delete(corr)) return;
    this.#read.add(stream);
    for (const sibling of siblings) this.#left.set(sibling, nowMs);
  }

  /** The corr is closed, and its stream, if that is known, not ended. */
  close(corr: number, stream: string | null, nowMs: number): void {
    const asked = this.#asked.get(corr) ?? 0;
    this.#asked.delete(corr);
    for (let n = 0; n < asked; n++) this.#left.set(Symbol(), nowMs);
    if (stream !== null && this.#read.delete(stream)) this.#left.set(stream, nowMs);
  }

  refused(corr: number): void {
    this.#asked.delete(corr);
  }

  ended(stream: string): void {
    this.#read.delete(stream);
    this.#left.delete(stream);
  }
}
