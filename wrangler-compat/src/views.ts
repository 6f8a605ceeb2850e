/** Encodes logged frames as the body of a response: as frames, or as events like edge/sse.py. */

import { decode, encode } from "../../edge/web/tailrace/wire.js";
import type { Frame, Score, StreamEnd, TokenScores } from "../../edge/web/tailrace/schema.js";
import { TailraceError, asReported, errorBody } from "./errors";
import { type FrameRun, framesOf } from "./frames";
import { FRAMES, SSE, type View } from "./request";

const text = new TextEncoder();
const fromUtf8 = new TextDecoder();

/** Bounds of the time in ms after which an EventSource reconnects. */
const MIN_RETRY_MS = 500;
const MAX_RETRY_MS = 2_000;
const PING = text.encode(": ping\n\n");

/** Encodes the frames of one body. */
export interface Encoder {
  frames(run: FrameRun): Uint8Array;
  /** Return a keep-alive: bytes that contain no frame of the stream. */
  keepAlive(): Uint8Array;
  /** Return the last bytes of a body whose stream ends with an error. */
  failure(error: TailraceError): Uint8Array;
}

export function encoderOf(view: View, random: () => number = Math.random): Encoder {
  if (view === FRAMES) return new RawFrames();
  return view === SSE ? new Events(random) : new Lines();
}

/** Return the `retry` field, which begins a body of events. Its time is random, so that readers
 * that lose their connections together do not reconnect at the same moment. `random` returns a
 * number from 0 up to 1. */
function retry(random: () => number): string {
  const ms = MIN_RETRY_MS + Math.floor(random() * (MAX_RETRY_MS - MIN_RETRY_MS + 1));
  return `retry: ${ms}\n\n`;
}

class RawFrames implements Encoder {
  frames(run: FrameRun): Uint8Array {
    return run.bytes;
  }

  keepAlive(): Uint8Array {
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
}

class Events implements Encoder {
  #begun = false;
  readonly #random: () => number;

  constructor(random: () => number) {
    this.#random = random;
  }

  frames(run: FrameRun): Uint8Array {
    let events = this.#begin();
    for (const raw of framesOf(run.bytes)) events += event(raw);
    return text.encode(events);
  }

  keepAlive(): Uint8Array {
    return PING;
  }

  failure(error: TailraceError): Uint8Array {
    return text.encode(this.#begin() + format(null, "error", errorBody(error)));
  }

  #begin(): string {
    if (this.#begun) return "";
    this.#begun = true;
    return retry(this.#random);
  }
}

/** JSON lines, which begin with no line of their own. */
class Lines implements Encoder {
  frames(run: FrameRun): Uint8Array {
    return text.encode(Array.from(framesOf(run.bytes), line).join(""));
  }

  keepAlive(): Uint8Array {
    return text.encode(lineOf("ping", {}));
  }

  failure(error: TailraceError): Uint8Array {
    return text.encode(lineOf("error", errorBody(error)));
  }
}

export function errorFrame(fault: TailraceError): Frame {
  const error = asReported(fault);
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

/** Return the event of one logged frame. Its id is the index of the frame. */
function event(raw: Uint8Array): string {
  const found = eventOf(raw);
  return found === null ? "" : format(found.fields.index, found.name, found.fields);
}

/** Return the line of one logged frame, as edge/generate/json_lines.py does. */
function line(raw: Uint8Array): string {
  const found = eventOf(raw);
  return found === null ? "" : lineOf(found.name ?? "token", found.fields);
}

function lineOf(type: string, fields: object): string {
  return `${JSON.stringify({ type, ...fields }, plain)}\n`;
}

/** Return the name of a logged frame's event, null for text, and the fields of its data. */
function eventOf(
  raw: Uint8Array,
): { name: string | null; fields: { index: number } & Record<string, unknown> } | null {
  const { frame } = decode(raw);
  switch (frame.type) {
    case "Token":
      return { name: null, fields: { text: frame.text, index: frame.index } };
    case "ScoredToken": {
      const logprobs = frame.scores.map(withTop);
      return { name: null, fields: { text: frame.text, index: frame.index, logprobs } };
    }
    case "StreamEnd":
      return { name: "end", fields: endFields(frame) };
    default: {
      if (!("index" in frame)) return null;
      const { type, ...fields } = frame;
      return { name: type.toLowerCase(), fields };
    }
  }
}

/** Return the fields of the last event. `message` and `retryable` are left out if empty or false.
 */
function endFields(end: StreamEnd): { index: number } & Record<string, unknown> {
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

/** Return the fields of a score, and `bytes` if the token's bytes are not valid UTF-8. */
function scoreFields(score: Score): object {
  const token = fromUtf8.decode(score.token);
  const fields = { id: score.id, token, logprob: score.logprob };
  const again = text.encode(token);
  const isText =
    again.length === score.token.length && again.every((byte, at) => byte === score.token[at]);
  return isText ? fields : { ...fields, bytes: [...score.token] };
}

function format(index: number | null, name: string | null, fields: object): string {
  // JSON escapes line breaks, so the data is always one line.
  const data = JSON.stringify(fields, plain);
  const id = index === null ? "" : `id: ${index}\n`;
  return `${id}${name === null ? "" : `event: ${name}\n`}data: ${data}\n\n`;
}

/** Replace bytes by base64, since JSON has no bytes. JSON writes infinity as null. */
function plain(_name: string, value: unknown): unknown {
  if (!(value instanceof Uint8Array)) return value;
  return btoa(Array.from(value, (byte) => String.fromCharCode(byte)).join(""));
}

