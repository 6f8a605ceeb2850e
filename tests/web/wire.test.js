// The vectors of tests/vectors, by the codec of the browser's client.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { typeOf } from "../../edge/web/tailrace/bare.js";
import { decodeValue } from "../../edge/web/tailrace/decode.js";
import { emptySink, encodeValue } from "../../edge/web/tailrace/encode.js";
import { bySocket } from "../../edge/web/tailrace/socket.js";
import * as wire from "../../edge/web/tailrace/wire.js";

const vectors = (name) =>
  JSON.parse(readFileSync(new URL(`../vectors/${name}.json`, import.meta.url), "utf8"));

/** A value as the vectors write it. */
function written(value) {
  if (value instanceof Uint8Array) return wire.toHex(value);
  if (typeof value === "bigint") return String(value);
  if (typeof value === "number" && !Number.isFinite(value)) return String(value);
  if (Array.isArray(value)) return value.map(written);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([name, of]) => [name, written(of)]));
}

/** -0 and 0 are different bytes; assert's strict equality knows. */
function roundTrip(of, hex, value) {
  const bytes = wire.fromHex(hex);
  const source = { bytes, view: new DataView(bytes.buffer), at: 0 };
  const decoded = decodeValue(typeOf(of), source);
  assert.deepStrictEqual(written(decoded), value);
  assert.equal(source.at, bytes.length);
  const sink = emptySink();
  encodeValue(typeOf(of), sink, decoded);
  assert.equal(wire.toHex(sink.bytes.slice(0, sink.size)), hex);
}

for (const { type, value, hex } of vectors("primitives").valid) {
  test(`${type} ${hex}`, () => roundTrip(type, hex, value));
}

for (const { type, hex, offset, why } of vectors("primitives").invalid) {
  test(`no ${type}: ${why}`, () => {
    const bytes = wire.fromHex(hex);
    const source = { bytes, view: new DataView(bytes.buffer), at: 0 };
    assert.throws(
      () => decodeValue(typeOf(type), source),
      (error) => error instanceof wire.FrameError && error.offset === offset,
    );
  });
}

for (const { name, type, tag, corr, value, hex } of vectors("frames")) {
  test(`a frame: ${name}`, () => {
    const raw = wire.fromHex(hex);
    const decoded = wire.decode(raw);
    assert.equal(decoded.corr, corr);
    assert.deepStrictEqual(written(decoded.frame), { type, ...value });
    assert.deepStrictEqual([wire.tagOf(raw), wire.corrOf(raw)], [tag, corr]);
    assert.equal(wire.toHex(wire.encode(decoded.frame, corr)), hex);
    const moved = wire.withCorr(raw, 77);
    assert.equal(wire.decode(moved).corr, 77);
    assert.deepStrictEqual(wire.withCorr(moved, corr), raw);
  });
}

for (const { name, hex, code, field, offset } of vectors("invalid")) {
  test(`no frame: ${name}`, () => {
    assert.throws(
      () => wire.decode(wire.fromHex(hex)),
      (error) => {
        assert.ok(error instanceof wire.FrameError, String(error));
        assert.deepStrictEqual([error.code, error.field, error.offset], [code, field, offset]);
        return true;
      },
    );
  });
}

for (const { name, chunks, frames, pending, error } of vectors("streams")) {
  test(`a connection: ${name}`, () => {
    const splitter = new wire.Splitter();
    const seen = [];
    const feed = () => {
      for (const chunk of chunks) {
        for (const raw of splitter.feed(wire.fromHex(chunk))) seen.push(wire.toHex(raw));
      }
    };
    if (error === undefined) {
      feed();
      assert.equal(splitter.pending, pending);
      assert.deepStrictEqual(seen, frames);
    } else {
      const told = ({ code, field, offset }) => ({ code, field, offset });
      assert.throws(feed, (fault) => {
        assert.deepStrictEqual(told(fault), error);
        return true;
      });
      assert.throws(() => splitter.feed(new Uint8Array()), wire.FrameError);
    }
  });
}

const token = { type: "Token", text: " the", index: 42 };

for (const [says, frame, field, offset] of [
  ["text that is none", { ...token, text: 7 }, "Token.text", 9],
  ["a lone surrogate", { ...token, text: "\ud800" }, "Token.text", 9],
  ["an index below 0", { ...token, index: -1 }, "Token.index", 14],
  ["an index that is half", { ...token, index: 0.5 }, "Token.index", 14],
  ["an index of 65 bits", { ...token, index: 2n ** 64n }, "Token.index", 14],
  ["a number that is no longer exact", { ...token, index: 2 ** 53 }, "Token.index", 14],
  ["a field left out", { type: "Token", text: "" }, "Token.index", 10],
  ["a stream id of 4 digits", { type: "Status", stream: "abcd" }, "Status.stream", 9],
  ["a nonce that is too short", { type: "Proof", mac: new Uint8Array(31) }, "Proof.mac", 9],
  ["a number over f32", { type: "Embedding", values: [1e39], index: 0 }, "Embedding.values[0]", 10],
  ["a word of no enum", { type: "Status", stream: "0".repeat(32), state: "odd" }, "Status.state", 25],
  ["an unknown frame", { type: "Nothing" }, "Nothing", 0],
]) {
  test(`not encoded: ${says}`, () => {
    assert.throws(
      () => wire.encode(frame),
      (error) => {
        assert.ok(error instanceof wire.FrameError, String(error));
        assert.deepStrictEqual([error.field, error.offset], [field, offset]);
        return true;
      },
    );
  });
}

test("more messages than a conversation may have are refused before one is made", () => {
  const open = vectors("frames").find(({ type }) => type === "Open");
  const frame = wire.decode(wire.fromHex(open.hex)).frame;
  const messages = Array.from({ length: 1025 }, () => ({ role: "", content: "" }));
  const raw = wire.encode({ ...frame, messages });
  assert.throws(() => wire.decode(raw), { field: "Open.messages" });
});

test("a tag that is the other side's ends a connection", () => {
  const splitter = new wire.Splitter({ tags: new Set([wire.TAGS.Open]) });
  assert.throws(() => splitter.feed(wire.encode(token)), { field: "tag", message: /not this side's/ });
});

test("text whose length lies on the end of what was allotted first", () => {
  const uint = typeOf("uint");
  for (let size = 250; size < 260; size += 1) {
    const sink = emptySink();
    sink.size = size;
    encodeValue(uint, sink, 300);
    assert.equal(wire.toHex(sink.bytes.slice(size, sink.size)), "ac02", `at ${size}`);
  }
});

test("the stages of a request go into the Open that a WebSocket sends", () => {
  /** @type {Uint8Array[]} */
  const sent = [];
  /** @type {any} */
  let socket;
  class Socket {
    constructor() {
      socket = this;
    }
    /** @param {Uint8Array} bytes */
    send(bytes) {
      sent.push(bytes);
    }
  }
  const input = { model: "safe", prompt: "Once", stages: { punctuate: false, group: true } };
  const allowance = { limit: 8, bytes: 1024 };
  const asked = { url: "http://edge/v1/", id: null, token: null, input, idempotencyKey: "k", nextIndex: 0, allowance };
  /** @type {any} */
  const system = { WebSocket: Socket, clearTimer: () => {} };
  bySocket(/** @type {any} */ (asked), system, /** @type {any} */ (() => {}));
  socket.onopen();
  const [, open] = sent.map((bytes) => /** @type {any} */ (wire.decode(bytes).frame));
  assert.deepEqual(open.stages, [
    { stage: "punctuate", on: false },
    { stage: "group", on: true },
  ]);
});
