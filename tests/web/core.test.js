// The rules of a reader, without connections: fed frames, failures and a clock.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Core, WINDOW_FRAMES } from "../../edge/web/tailrace/core.js";
import { TailraceError } from "../../edge/web/tailrace/errors.js";
import { Transcript } from "../../edge/web/tailrace/transcript.js";

const token = (index, text = "x") => ({ type: "Token", text, index });
const end = (index) => ({ type: "StreamEnd", index, finish_reason: "stop" });
const passing = (retryAfterMs = null) =>
  new TailraceError("away", { code: "unavailable", retryable: true, retryAfterMs });

function opened(random = () => 0.5) {
  const core = new Core(0, random);
  core.silenceMs = 10_000;
  core.start(0);
  core.opened();
  return core;
}

const taken = (core) => {
  const indexes = [];
  for (let frame = core.take(); frame; frame = core.take()) indexes.push(frame.index);
  return indexes;
};

test("frames that were read before are dropped", () => {
  const core = opened();
  for (const index of [0, 1, 0, 1, 2, 2]) core.receive(token(index), 10, 1);
  assert.deepEqual(taken(core), [0, 1, 2]);
});

test("a gap breaks the connection, and nothing behind it is given", () => {
  const core = opened();
  for (const index of [0, 2, 3]) core.receive(token(index), 10, 1);
  assert.equal(core.state, "waiting");
  assert.equal(core.fault.code, "frames_missing");
  assert.deepEqual(taken(core), [0]);
  assert.equal(core.nextIndex, 1);
});

test("a gap that stays is an error in the end", () => {
  const core = opened();
  for (let now = 0; core.state !== "failed"; now = core.due) {
    core.tick(now);
    core.opened();
    core.receive(token(1), 10, now);
  }
  assert.equal(core.fault.code, "frames_missing");
});

test("the end is the end, whatever comes behind it", () => {
  const core = opened();
  core.receive(end(0), 10, 1);
  core.lost(passing(), 2);
  core.restart(3);
  assert.equal(core.state, "ended");
  assert.equal(core.due, null);
});

test("waits are drawn from a range that doubles, from half a second to thirty", () => {
  for (const [draw, expected] of [
    [0, [500, 500, 500, 500, 500, 500, 500, 500]],
    [1, [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]],
  ]) {
    const core = new Core(0, () => draw, { patienceMs: Infinity });
    const waits = [];
    for (let now = 0; waits.length < expected.length; now = core.due) {
      core.start(now);
      core.lost(passing(), now);
      waits.push(core.due - now);
    }
    assert.deepEqual(waits, expected);
  }
});

test("a new frame makes the next failure a first one", () => {
  const core = opened(() => 1);
  for (let index = 0; index < 3; index++) {
    core.receive(token(index), 10, 0);
    core.lost(passing(), 0);
    assert.equal(core.due, 1000);
    core.tick(1000);
    core.opened();
  }
});

test("Retry-After is waited for, also by who is woken", () => {
  const core = opened();
  core.lost(passing(7000), 0);
  core.wake(100);
  assert.equal(core.state, "waiting");
  assert.equal(core.due, 7000);
  core.tick(7000);
  assert.equal(core.state, "connecting");
});

test("who is woken does not wait for the timer", () => {
  const core = opened();
  core.lost(passing(), 0);
  core.wake(1);
  assert.equal(core.state, "connecting");
});

test("what will not pass fails at once, and can be begun again", () => {
  const core = opened();
  core.receive({ type: "StreamError", code: "unknown_stream", message: "", status: 404, retryable: false }, 9, 1);
  assert.equal(core.state, "failed");
  assert.equal(core.fault.status, 404);
  core.restart(2);
  assert.equal(core.state, "connecting");
  assert.equal(core.fault, null);
});

test("patience ends, and begins anew with reconnect", () => {
  const core = opened();
  let now = 0;
  for (; core.state !== "failed"; now = core.due ?? now) {
    core.tick(now);
    core.lost(passing(), now);
  }
  assert.ok(now > 60_000 && now <= 120_000, String(now));
  core.restart(now);
  core.lost(passing(), now);
  assert.equal(core.state, "waiting");
});

test("silence is a broken connection, unless the page itself was frozen", () => {
  const core = opened();
  core.tick(10_000 + 3_600_000); // an hour late
  assert.equal(core.state, "open");
  core.tick(core.due);
  assert.equal(core.state, "waiting");
  assert.equal(core.fault.code, "silent");
});

test("a heartbeat is a sign of life", () => {
  const core = opened();
  core.receive({ type: "Heartbeat" }, 9, 9_999);
  core.tick(10_000);
  assert.equal(core.state, "open");
  assert.equal(core.due, 19_999);
});

test("who detaches reads on from what was not taken", () => {
  const core = opened();
  for (let index = 0; index < 5; index++) core.receive(token(index), 10, 0);
  core.take();
  core.detach();
  assert.deepEqual([core.nextIndex, core.take(), core.state], [1, undefined, "detached"]);
  core.restart(1);
  assert.equal(core.state, "connecting");
});

test("no more than a window is asked for before something is taken", () => {
  const core = opened();
  assert.deepEqual(core.allowance, { limit: WINDOW_FRAMES, bytes: 262_144 });
  for (let index = 0; index < WINDOW_FRAMES; index++) core.receive(token(index), 10, 0);
  assert.ok(core.full);
  assert.equal(core.allowance.limit, WINDOW_FRAMES);
  assert.equal(core.allowance.bytes, 262_144);
  core.take();
  assert.ok(!core.full);
  assert.deepEqual(core.allowance, { limit: WINDOW_FRAMES + 1, bytes: 262_154 });
});

test("few large frames fill a window as well", () => {
  const core = opened();
  core.receive(token(0), 300_000, 0);
  assert.ok(core.full);
  assert.deepEqual(core.allowance, { limit: WINDOW_FRAMES, bytes: 300_000 });
});

test("a text is what its revisions leave of it", () => {
  const transcript = new Transcript();
  const revision = (index, replaces, text) => ({ type: "Revision", index, replaces, text });
  for (const frame of [
    token(0, "a"), token(1, "b"), token(2, "c"), { type: "Notice", index: 3 }, token(4, "d"),
    revision(5, 2, "C"), token(6, "e"), revision(7, 4, "!"), token(8, "?"), revision(9, 3, "+"),
  ]) {
    transcript.add(frame);
  }
  assert.equal(transcript.text, "ab+");
  const late = new Transcript();
  late.add(token(7, "g"));
  late.add(revision(8, 2, "all"));
  assert.equal(late.text, "all");
});
