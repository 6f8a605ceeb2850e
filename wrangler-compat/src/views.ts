/** Logged frames as bytes of a body, in either view; the words of edge/sse.py. */

import { decode, encode } from "../../edge/web/tailrace/wire.js";
import type { Frame, Score, StreamEnd, TokenScores } from "../../edge/web/tailrace/schema.js";
import { TailraceError, errorBody, told } from "./errors";
import { type FrameRun, framesOf } from "./frames";
import { FRAMES, type View } from "./request";

const text = new TextEncoder();
const fromUtf8 = new TextDecoder();

/** The first words of a body: a browser that loses it asks again after half a second. */
const RETRY = "retry: 500\n\n";
const PING = text.encode(": ping\n\n");

/** How frames become bytes of one body. */
export interface Encoder {
  frames(run: FrameRun): Uint8Array;
  /** Bytes that carry no frame of the stream. */
  signOfLife(): Uint8Array;
  /** What closes a body that was to have only what there was. */
  status(id: string, nextIndex: number): Uint8Array;
  /** What closes a body whose stream cannot be read on. */
  failure(error: TailraceError): Uint8Array;
}

export function encoderOf(view: View): Encoder {
  return view === FRAMES ? new RawFrames() : new Events();
}

class RawFrames implements Encoder {
  frames(run: FrameRun): Uint8Array {
    return run.bytes;
  }

  signOfLife(): Uint8Array {
    return encode({
      type: "Heartbeat",
      clock_ms: Date.now(),
      ready: true,
      reasons: [],
      models: [],
      devices: [],
      patience_ms: 0,
      streams: 0,
      room: 0,
      corrs: 0,
      ledger: "",
      tiers: [],
    });
  }

  failure(error: TailraceError): Uint8Array {
    return encode(errorFrame(error));
  }

  status(id: string, nextIndex: number): Uint8Array {
    return encode({ type: "Status", stream: id, state: "running", next_index: nextIndex });
  }
}

class Events implements Encoder {
  #begun = false;

  frames(run: FrameRun): Uint8Array {
    let events = this.#begin();
    for (const raw of framesOf(run.bytes)) events += event(raw);
    return text.encode(events);
  }

  signOfLife(): Uint8Array {
    return PING;
  }

  failure(error: TailraceError): Uint8Array {
    return text.encode(this.#begin() + format(null, "error", errorBody(error)));
  }

  status(): Uint8Array {
    return new Uint8Array(); // no event is made of one
  }

  #begin(): string {
    if (this.#begun) return "";
    this.#begun = true;
    return RETRY;
  }
}

export function errorFrame(fault: TailraceError): Frame {
  const error = told(fault);
  return {
    type: "StreamError",
    code: error.code,
    message: error.message,
    retryable: error.retryable,
    status: error.status,
    field: error.field,
    hint: error.hint,
    retry_after_ms: error.retryAfterMs,
  };
}

/** The event of one logged frame, whose id is its index. */
function event(raw: Uint8Array): string {
  const { frame } = decode(raw);
  switch (frame.type) {
    case "Token":
      return format(frame.index, null, { text: frame.text, index: frame.index });
    case "ScoredToken":
      return format(frame.index, null, {
        text: frame.text,
        index: frame.index,
        logprobs: frame.scores.map(withTop),
      });
    case "StreamEnd":
      return format(frame.index, "end", endFields(frame));
    default: {
      if (!("index" in frame)) return "";
      const { type, ...fields } = frame;
      return format(frame.index, type.toLowerCase(), fields);
    }
  }
}

/** `message` and `retryable` only where there is one, or it is. */
function endFields(end: StreamEnd): object {
  const { type: _, message, retryable, ...fields } = end;
  return {
    ...fields,
    ...(message === null ? {} : { message }),
    ...(retryable ? { retryable } : {}),
  };
}

function withTop(scores: TokenScores): object {
  return { ...scoreFields(scores.chosen), top: scores.top.map(scoreFields) };
}

/** `bytes` is there where a token is no text by itself. */
function scoreFields(score: Score): object {
  const token = fromUtf8.decode(score.token);
  const fields = { id: score.id, token, logprob: score.logprob };
  const again = text.encode(token);
  const isText =
    again.length === score.token.length && again.every((byte, at) => byte === score.token[at]);
  return isText ? fields : { ...fields, bytes: [...score.token] };
}

function format(index: number | null, name: string | null, fields: object): string {
  // JSON leaves no bare line break in the data, so one data line always does.
  const data = JSON.stringify(fields, plain);
  const id = index === null ? "" : `id: ${index}\n`;
  return `${id}${name === null ? "" : `event: ${name}\n`}data: ${data}\n\n`;
}

/** JSON knows no infinity, which it writes as null, and no bytes. */
function plain(_name: string, value: unknown): unknown {
  if (!(value instanceof Uint8Array)) return value;
  return btoa(Array.from(value, (byte) => String.fromCharCode(byte)).join(""));
}

