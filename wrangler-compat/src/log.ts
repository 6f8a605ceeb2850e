/** The storage of an object: the frames of its stream, a row per commit, and known tokens. */

import type { Opened } from "../../edge/web/tailrace/schema.js";
import { type FrameRun, isEnd, joined, partOf } from "./frames";

/** Maximum bytes of a row. The SQLite of an object allows 2 MB; not every runtime enforces that. */
const MAX_ROW_BYTES = 1_900_000;
/** Maximum rows of one read. A stream whose tokens arrived one by one has many small rows. */
const READ_ROWS = 64;
/** Maximum number of remembered tokens. The edge behind is asked again about older ones. */
const MAX_TOKENS = 256;

/** Facts about a stream besides its frames. */
export interface About {
  /** The last Opened frame of the edge behind, without its token and siblings. */
  opened: Opened;
  /** Token with which the object continues to read after a restart. Empty if it needs none. */
  token: string;
  /** True if the edge behind has accepted a reader without a token or key. */
  open: boolean;
  /** True while the object reads the stream, so that it continues after a restart. */
  reading: boolean;
}

interface Row extends Record<string, SqlStorageValue> {
  first: number;
  next: number;
  bytes: ArrayBuffer;
}

export class Log {
  readonly #storage: DurableObjectStorage;
  #about: About | undefined;
  /** The index of the next frame, and true if the stream has ended. Both are read from the rows. */
  next = 0;
  ended = false;

  constructor(storage: DurableObjectStorage) {
    this.#storage = storage;
    this.#about = storage.kv.get<About>("about");
    if (this.#about !== undefined) this.#derive();
  }

  #derive(): void {
    const [row] = this.#storage.sql
      .exec<Row>("SELECT first, next, bytes FROM frames ORDER BY first DESC LIMIT 1")
      .toArray();
    this.next = row?.next ?? 0;
    this.ended = row !== undefined && isEnd(runOf(row));
  }

  get about(): About | undefined {
    return this.#about;
  }

  /** Store the facts about the stream, if they have changed. */
  note(about: About): void {
    if (this.#about === undefined) this.#create();
    else if (isSame(this.#about, about)) return;
    this.#about = about;
    this.#storage.kv.put("about", about);
  }

  #create(): void {
    const sql = this.#storage.sql;
    sql.exec(
      "CREATE TABLE IF NOT EXISTS frames" +
        " (first INTEGER PRIMARY KEY, next INTEGER NOT NULL, bytes BLOB NOT NULL)",
    );
    sql.exec(
      "CREATE TABLE IF NOT EXISTS tokens" +
        " (token TEXT PRIMARY KEY, expires_ms INTEGER NOT NULL)",
    );
  }

  /** Write consecutive runs. They are durable after the storage's `sync`. */
  append(runs: FrameRun[]): void {
    for (const run of rowsOf(runs)) {
      if (run.first !== this.next) throw new Error(`frame ${run.first} after ${this.next - 1}`);
      this.#storage.sql.exec(
        "INSERT INTO frames VALUES (?, ?, ?)",
        run.first,
        run.next,
        run.bytes.slice().buffer,
      );
      this.next = run.next;
      this.ended = isEnd(run);
    }
  }

  /** Return about `most` bytes from frame `from` on, and at least one frame, from rows that begin
   * before frame `end`. */
  read(from: number, end: number, most: number): FrameRun {
    const rows = this.#storage.sql.exec<Row>(
      "SELECT first, next, bytes FROM frames" +
        " WHERE first >= (SELECT max(first) FROM frames WHERE first <= ?) AND first < ?" +
        " ORDER BY first LIMIT ?",
      from,
      end,
      READ_ROWS,
    );
    const runs: FrameRun[] = [];
    let size = 0;
    for (const row of rows) {
      const part = partOf(runOf(row), Math.max(from, row.first), most - size);
      runs.push(part);
      size += part.bytes.length;
      if (size >= most || part.next < row.next) break;
    }
    return joined(runs);
  }

  /** Remember a token that the edge behind has issued or accepted, until it expires. */
  remember(digest: string, expiresMs: number): void {
    const sql = this.#storage.sql;
    sql.exec("INSERT OR REPLACE INTO tokens VALUES (?, ?)", digest, expiresMs);
    sql.exec(
      "DELETE FROM tokens WHERE rowid <= (SELECT max(rowid) FROM tokens) - ?",
      MAX_TOKENS,
    );
  }

  /** Return true if the token was remembered and has not expired. */
  knows(digest: string, nowMs: number): boolean {
    if (this.#about === undefined) return false;
    const [row] = this.#storage.sql
      .exec<{ expires_ms: number }>("SELECT expires_ms FROM tokens WHERE token = ?", digest)
      .toArray();
    return row !== undefined && row.expires_ms > nowMs;
  }

  /** Delete everything. */
  async forget(): Promise<void> {
    await this.#storage.deleteAll();
    this.#about = undefined;
    this.next = 0;
    this.ended = false;
  }
}

function runOf(row: Row): FrameRun {
  return { first: row.first, next: row.next, bytes: new Uint8Array(row.bytes) };
}

/** Join the runs into as few rows as their maximum size allows. */
function rowsOf(runs: FrameRun[]): FrameRun[] {
  const rows: FrameRun[] = [];
  let open: FrameRun[] = [];
  let size = 0;
  for (const run of runs) {
    if (size + run.bytes.length > MAX_ROW_BYTES && open.length) {
      rows.push(joined(open));
      open = [];
      size = 0;
    }
    open.push(run);
    size += run.bytes.length;
  }
  if (open.length) rows.push(joined(open));
  return rows;
}

function isSame(one: About, other: About): boolean {
  return JSON.stringify(one) === JSON.stringify(other);
}
