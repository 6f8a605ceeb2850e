/** One WebSocket client: many streams, told apart by corr; the rules of edge/session.py.
 *
 * Sans-I/O: messages in; what is to be asked and what is to be told out. A fault that concerns one
 * stream ends that stream; after one that makes the frames of the connection meaningless comes a
 * StreamError on corr 0, and the end of the connection.
 */

import {
  CLIENT,
  FrameError,
  SCHEMA_ID,
  Splitter,
  corrOf,
  decode,
  encode,
  fromHex,
  toHex,
} from "../../edge/web/tailrace/wire.js";
import type { Cancel, Credit, Frame, Open, Resume, Steer } from "../../edge/web/tailrace/schema.js";
import { TailraceError, callerError, spreadMs } from "./errors";
import { Unfinished } from "./unfinished";
import { errorFrame } from "./views";

export type Request = Open | Resume | Cancel | Steer;

/** Of one WebSocket message, in either direction, unless one frame alone is larger. */
export const MAX_MESSAGE_BYTES = 64 << 10;
const MAX_STREAMS = 256;
const MAX_UNFINISHED = 64;
/** Frames of one stream that a client may ask to have in flight. */
const MAX_CREDIT_FRAMES = 1_024;
const UNFINISHED_RETRY_MS = 1_000;

/** Codes of RFC 6455, 7.4.1. */
const PROTOCOL_ERROR = 1002;
const UNSUPPORTED_DATA = 1003;
const MESSAGE_TOO_BIG = 1009;

export interface Close {
  code: number;
  reason: string;
}

/** An open corr: what may be sent on it, and how far that has got. */
export interface OpenStream {
  /** Of the stream that is read, once it is known. */
  id: string | null;
  next: number;
  limit: number;
  limitBytes: number;
  sentBytes: number;
  /** Told of when there is more credit, or the corr is closed. */
  wake: (() => void) | null;
  /** Called when the corr is closed. */
  left: (() => void) | null;
}

export class Session {
  readonly streams = new Map<number, OpenStream>();
  readonly unfinished: Unfinished;
  greeted: boolean;
  /** What credit does not bound. */
  replies: Uint8Array[] = [];
  close: Close | null = null;

  /** `greeted` and `left` are of a session that slept. */
  constructor(software: string, greeted = false, left: number[] = []) {
    this.greeted = greeted;
    this.unfinished = new Unfinished(MAX_UNFINISHED, left);
    if (!greeted) this.#reply({ type: "Hello", schema: fromHex(SCHEMA_ID), software }, 0);
  }

  /** One message; gives the requests in it, whose corrs are open now. */
  receive(message: ArrayBuffer | string, nowMs: number): [number, Request][] {
    const asked: [number, Request][] = [];
    if (this.close !== null) return asked;
    try {
      for (const raw of frameOfMessage(message)) this.#frame(raw, nowMs, asked);
    } catch (error) {
      if (!(error instanceof TailraceError)) throw error;
      this.end(error, codeOf(error));
    }
    return asked;
  }

  #frame(raw: Uint8Array, nowMs: number, asked: [number, Request][]): void {
    let corr: number;
    let frame: Frame;
    try {
      ({ corr, frame } = decode(raw));
    } catch (error) {
      corr = corrOf(raw);
      if (!(error instanceof FrameError) || corr === 0 || !this.greeted) throw error;
      // The framing around a bad payload is sound: only its stream suffers.
      this.#abandon(corr, error);
      return;
    }
    if (!this.greeted) this.#greet(frame);
    else if (frame.type === "Credit") this.#credit(corr, frame);
    else if (frame.type === "Detach") this.detach(corr);
    else if (isRequest(frame)) this.#request(corr, frame, nowMs, asked);
    else throw new FrameError(`${frame.type} is not for a client to send here`, "tag", 4);
  }

  #greet(frame: Frame): void {
    const about = { code: "schema_mismatch", status: 426 };
    if (frame.type !== "Hello") throw callerError("the first frame must be a Hello", about);
    const schema = toHex(frame.schema);
    if (schema !== SCHEMA_ID) {
      throw callerError(`schema ${schema} is not spoken here`, {
        ...about,
        field: "Hello.schema",
        hint: `this edge speaks ${SCHEMA_ID}`,
      });
    }
    this.greeted = true;
  }

  #request(corr: number, frame: Request, nowMs: number, asked: [number, Request][]): void {
    if (corr === 0 || this.streams.has(corr)) {
      throw callerError(`corr ${corr} is not free`, {
        code: "corr_in_use",
        field: "corr",
        hint: "a request takes a corr that is not 0 and has no open stream",
      });
    }
    const fault = this.#faultOf(frame, nowMs);
    if (fault !== null) {
      this.refuse(corr, fault);
      return;
    }
    if (frame.type === "Open") this.unfinished.ask(corr, Number(frame.n));
    this.streams.set(corr, openStream(frame));
    asked.push([corr, frame]);
  }

  #faultOf(frame: Request, nowMs: number): TailraceError | null {
    if (this.streams.size >= MAX_STREAMS) {
      return callerError(`over ${MAX_STREAMS} open streams on this connection`, {
        code: "too_many_streams",
        status: 429,
        retryable: true,
        hint: "detach or finish one first, or open another connection",
      });
    }
    if (frame.caller !== null && frame.caller !== undefined) {
      const hint = "leave it out";
      return callerError("who asks is the edge's to say", { field: "caller", hint });
    }
    const credit = "credit" in frame ? Number(frame.credit) : 0;
    if (credit > MAX_CREDIT_FRAMES) return tooMuchCredit(`${frame.type}.credit`);
    if (frame.type === "Open" && !this.unfinished.hasRoom(Number(frame.n), nowMs)) {
      return callerError(
        `over ${MAX_UNFINISHED} streams that this connection opened have not ended`,
        {
          code: "too_many_streams",
          status: 429,
          retryable: true,
          hint: "read them to their end or cancel them; those that were left count for a while",
          retryAfterMs: spreadMs(UNFINISHED_RETRY_MS),
        },
      );
    }
    return null;
  }

  #credit(corr: number, credit: Credit): void {
    const stream = this.streams.get(corr);
    if (stream === undefined) return; // it has closed while the credit was on its way
    const limit = Number(credit.limit);
    if (limit > stream.next + MAX_CREDIT_FRAMES) {
      this.#abandon(corr, tooMuchCredit("Credit.limit"));
      return;
    }
    stream.limit = Math.max(stream.limit, limit);
    if (credit.bytes !== null && credit.bytes !== undefined) {
      const bytes = Number(credit.bytes);
      const isFirst = stream.limitBytes === Infinity;
      stream.limitBytes = isFirst ? bytes : Math.max(stream.limitBytes, bytes);
    }
    stream.wake?.();
  }

  /** The corr is free again, and whoever reads for it is told; nothing old may follow on it. */
  detach(corr: number): void {
    const stream = this.streams.get(corr);
    if (stream === undefined) return;
    this.streams.delete(corr);
    this.unfinished.close(corr, stream.id, Date.now());
    stream.left?.();
    stream.wake?.();
  }

  /** End one stream, or refuse one request, for what the client sent on its corr. */
  #abandon(corr: number, error: TailraceError): void {
    this.detach(corr);
    this.refuse(corr, error);
  }

  // ---- to the client ----

  refuse(corr: number, error: TailraceError): void {
    this.#reply(errorFrame(error), corr);
  }

  #reply(frame: Frame, corr: number): void {
    this.replies.push(encode(frame, corr));
  }

  /** After this error nothing on the connection means anything. */
  end(error: TailraceError, code: number): void {
    for (const corr of [...this.streams.keys()]) this.detach(corr);
    this.refuse(0, error);
    this.close = { code, reason: error.code };
  }

  /** The client has not said Hello in its time. */
  timeOut(): void {
    if (this.greeted || this.close !== null) return;
    const silent = { code: "request_timeout", status: 408 };
    this.end(callerError("no Hello has come", silent), PROTOCOL_ERROR);
  }
}

function frameOfMessage(message: ArrayBuffer | string): Uint8Array[] {
  if (typeof message === "string") {
    throw callerError("frames travel in binary messages", { code: "bad_frame" });
  }
  if (message.byteLength > MAX_MESSAGE_BYTES) {
    throw callerError("a message is too large", {
      code: "too_large",
      status: 413,
      hint: `at most ${MAX_MESSAGE_BYTES} bytes of frames in a message`,
    });
  }
  const splitter = new Splitter({ maxFrameBytes: MAX_MESSAGE_BYTES, tags: CLIENT });
  const frames = splitter.feed(new Uint8Array(message));
  if (splitter.pending > 0) {
    throw new FrameError("the message ends inside a frame", "header.length", 0);
  }
  return frames;
}

function codeOf(error: TailraceError): number {
  if (error.code === "too_large") return MESSAGE_TOO_BIG;
  const isText = error.code === "bad_frame" && !(error instanceof FrameError);
  return isText ? UNSUPPORTED_DATA : PROTOCOL_ERROR;
}

function openStream(frame: Request): OpenStream {
  const isRead = frame.type === "Open" || frame.type === "Resume";
  const next = frame.type === "Resume" ? Number(frame.after ?? -1) + 1 : 0;
  return {
    id: frame.type === "Resume" ? frame.stream : null,
    next,
    limit: isRead ? next + Number(frame.credit) : 0,
    limitBytes: isRead ? Number(frame.credit_bytes ?? Infinity) : 0,
    sentBytes: 0,
    wake: null,
    left: null,
  };
}

function isRequest(frame: Frame): frame is Request {
  return ["Open", "Resume", "Cancel", "Steer"].includes(frame.type);
}

function tooMuchCredit(field: string): TailraceError {
  return callerError("more credit than may be in flight", {
    code: "too_much_credit",
    field,
    hint: `at most ${MAX_CREDIT_FRAMES} frames beyond the last one received`,
  });
}
