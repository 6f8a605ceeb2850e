// The rules of a reader, without connections: fed frames, failures and a clock.

import assert from "node:assert/strict";
import { test } from "node:test";
import { branch } from "../../edge/web/tailrace/branch.js";
import { Core, QUIET_MS, WINDOW_FRAMES } from "../../edge/web/tailrace/core.js";
import { TailraceError, unreachable } from "../../edge/web/tailrace/errors.js";
import { byFetch } from "../../edge/web/tailrace/fetch.js";
import { smooth } from "../../edge/web/tailrace/smooth.js";
import { Transcript } from "../../edge/web/tailrace/transcript.js";

const token = (index, text = "x") => ({ type: "Token", text, index });
const end = (index) => ({ type: "StreamEnd", index, finish_reason: "stop" });
const passing = (retryAfterMs = null) =>
  new TailraceError("away", { code: "unavailable", retryable: true, retryAfterMs });

function opened(random = () => 0.5) {
  const core = new Core(0, random);
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

test("a snapshot stands for all of its frames", () => {
  const core = opened();
  core.receive({ type: "Snapshot", first: 0, text: "xxx", index: 2, reasoning: false }, 10, 1);
  assert.equal(core.nextIndex, 3);
  assert.equal(core.taken, 0);
  core.receive(token(3), 10, 1);
  assert.deepEqual(taken(core), [2, 3]);
  assert.equal(core.taken, 4);
});

test("a snapshot that begins later is a gap, and one that was read is dropped", () => {
  const snapshot = (first, index) => ({ type: "Snapshot", first, text: "x", index, reasoning: false });
  const core = opened();
  core.receive(token(0), 10, 1);
  core.receive(snapshot(0, 4), 10, 1);
  assert.equal(core.nextIndex, 1);
  core.receive(snapshot(2, 4), 10, 1);
  assert.equal(core.fault.code, "frames_missing");
});

test("a reader that floats begins with whatever comes first, once", () => {
  const core = opened();
  core.floats = true;
  core.receive(token(7), 10, 1);
  core.receive(token(8), 10, 1);
  assert.equal(core.floats, false);
  assert.equal(core.allowance.limit, 7 + WINDOW_FRAMES);
  core.receive(token(12), 10, 1);
  assert.equal(core.fault.code, "frames_missing");
  assert.deepEqual(taken(core), [7, 8]);
  core.detach();
  assert.equal(core.nextIndex, 9);
});

test("a reader that detaches before it took a snapshot reads it again", () => {
  const core = opened();
  core.receive({ type: "Snapshot", first: 0, text: "xxx", index: 2, reasoning: false }, 10, 1);
  core.receive(token(3), 10, 1);
  core.detach();
  assert.equal(core.nextIndex, 0);
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

test("a stream that flowed is quiet after two seconds without a frame", () => {
  const core = opened();
  core.tick(QUIET_MS); // nothing has come yet: it may wait for its turn
  assert.ok(!core.quiet);
  core.receive(token(0), 10, 5_000);
  assert.equal(core.due, 5_000 + QUIET_MS);
  core.tick(core.due);
  assert.ok(core.quiet);
  core.receive({ type: "Heartbeat" }, 9, 8_000);
  assert.ok(core.quiet);
  assert.equal(core.due, 18_000);
  core.receive(token(1), 10, 9_000);
  assert.ok(!core.quiet);
  core.tick(core.due);
  core.lost(passing(), 12_000);
  assert.deepEqual([core.quiet, core.state], [false, "waiting"]);
  core.tick(core.due);
  core.opened();
  assert.ok(core.quiet); // until a frame comes
  core.receive(end(2), 10, 14_000);
  assert.deepEqual([core.quiet, core.due], [false, null]);
});

test("a page that was frozen does not call its stream quiet", () => {
  const core = opened();
  core.receive(token(0), 10, 0);
  core.tick(QUIET_MS + 60_000);
  assert.ok(!core.quiet);
});

/** Ring the timer, which may ring for `quiet` first, until the state changes. */
function wait(core) {
  const { state } = core;
  for (let rings = 0; core.state === state && rings < 20; rings++) core.tick(core.due);
}

test("a reader that takes nothing lets go of its connection, and connects again when it goes on", () => {
  const core = opened();
  for (let index = 0; index < WINDOW_FRAMES; index++) core.receive(token(index), 10, 0);
  core.tick(3_600_000); // the page was frozen
  assert.equal(core.state, "open");
  wait(core);
  assert.deepEqual([core.state, core.quiet, core.due, core.fault], ["suspended", false, null, null]);
  core.wake(4_000_000); // only the reader continues it
  assert.equal(core.state, "suspended");
  assert.equal(taken(core).length, WINDOW_FRAMES);
  core.start(4_000_000);
  assert.deepEqual([core.state, core.nextIndex], ["connecting", WINDOW_FRAMES]);
  core.opened();
  core.receive(token(WINDOW_FRAMES), 10, 4_000_001);
  assert.deepEqual(taken(core), [WINDOW_FRAMES]);
});

test("a WebSocket that sends heartbeats is kept, because its server knows the credit", () => {
  const core = opened();
  for (let index = 0; index < WINDOW_FRAMES; index++) core.receive(token(index), 10, 0);
  for (let now = 0; now < 60_000; now += 1_000) {
    core.alive(now);
    core.tick(now);
  }
  assert.deepEqual([core.state, core.quiet], ["open", false]);
});

test("a connection that never opens is lost, also while the window is full", () => {
  const core = opened();
  for (let index = 0; index < WINDOW_FRAMES; index++) core.receive(token(index), 10, 0);
  core.lost(passing(), 1);
  wait(core);
  assert.equal(core.state, "connecting");
  wait(core);
  assert.deepEqual([core.state, core.fault.code], ["waiting", "silent"]);
});

test("a large frame suspends, too, and the stream can be left or read again by hand", () => {
  const core = opened();
  core.receive(token(0), 262_144, 0);
  wait(core);
  assert.equal(core.state, "suspended");
  core.restart(20_000);
  assert.equal(core.state, "connecting");
  core.opened();
  wait(core);
  assert.equal(core.state, "suspended");
  core.detach();
  assert.deepEqual([core.state, core.nextIndex], ["detached", 0]);
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

test("a group is part of every request of a stream", () => {
  const asked = (more) => {
    let found;
    const fetch = (url, init) => {
      found = { url, init };
      return new Promise(() => {});
    };
    byFetch({ url: "/v1/generate", openUrl: "/v1/generate", ...more }, { fetch }, {});
    return found;
  };
  const group = { by: "sentence", ms: 200, chars: null };
  assert.deepEqual(JSON.parse(asked({ input: { prompt: "Hi" }, group }).init.body), { prompt: "Hi", group });
  assert.equal(asked({ input: { prompt: "Hi" } }).init.body, '{"prompt":"Hi"}');
  const url = "/v1/generate/x?";
  assert.equal(asked({ id: "x", nextIndex: 5, group }).url, `${url}after=4&group=sentence&group_ms=200`);
  assert.equal(asked({ id: "x", nextIndex: 0, group: "word" }).url, `${url}group=word`);
  assert.equal(asked({ id: "x", nextIndex: 0 }).url, url);
});

test("a new stream is asked for with the token that its URL needs", () => {
  let found;
  const fetch = (url, init) => {
    found = { url, ...init };
    return new Promise(() => {});
  };
  const options = branch("http://edge/v1/generate", { id: "x", token: "t" }, { index: 2 });
  const { openUrl, openToken: token, input } = options;
  byFetch({ url: "http://edge/v1/generate", openUrl, token, input }, { fetch }, {});
  assert.equal(found.url, "http://edge/v1/generate/x/branch");
  assert.equal(found.headers["Tailrace-Token"], "t");
  assert.equal(options.headers, undefined); // the requests of the new stream have a token of its own
});

test("a text has that of snapshots, but for reasoning", () => {
  const text = new Transcript();
  text.add({ type: "Snapshot", first: 0, text: "hmm", index: 4, reasoning: true });
  text.add({ type: "Snapshot", first: 5, text: "Once upon", index: 9, reasoning: false });
  text.add({ type: "Revision", replaces: 10, text: " a tine", final: false, index: 10 });
  text.add({ type: "Revision", replaces: 10, text: " a time", final: true, index: 11 });
  assert.equal(text.text, "Once upon a time");
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

// ---- smooth ----

/** A stream whose frames come as `steps` say: at a time, a text. */
function scripted(steps, clock) {
  const transcript = new Transcript();
  return {
    seen: 0,
    get content() {
      return transcript.text;
    },
    async *[Symbol.asyncIterator]() {
      for (const [nth, [at, frame]] of steps.entries()) {
        await clock.until(at);
        const whole = typeof frame === "string" ? token(nth, frame) : { ...frame, index: nth };
        transcript.add(whole);
        yield whole;
      }
    },
  };
}

/** Time that passes when nothing else happens. */
class Clock {
  nowMs = 0;
  waiting = [];

  until(at) {
    return new Promise((resolve) => this.waiting.push({ at, resolve }));
  }

  async run(work) {
    let isDone = false;
    work.finally(() => { isDone = true; }).catch(() => {});
    while (!isDone) {
      await new Promise((resolve) => setImmediate(resolve));
      this.waiting.sort((a, b) => a.at - b.at);
      const next = this.waiting.shift();
      if (!next) continue;
      this.nowMs = Math.max(this.nowMs, next.at);
      next.resolve();
    }
    return work;
  }

  get pace() {
    return {
      now: () => this.nowMs,
      setTimer: (ring, ms) => void this.until(this.nowMs + ms).then(ring),
      off: false,
    };
  }
}

async function shownOf(reading, pace, clock) {
  const shown = [];
  for await (const text of smooth(reading, pace)) shown.push([clock.nowMs, text]);
  return shown;
}

const WORDS = Array.from({ length: 60 }, (_, nth) => ` word${nth}`);

test("text that comes at once is shown by words, within the lag", async () => {
  const clock = new Clock();
  const reading = scripted([[0, WORDS.join("")]], clock);
  const shown = await clock.run(shownOf(reading, clock.pace, clock));
  assert.ok(shown.length > 8, `${shown.length} steps`);
  for (const [, text] of shown) assert.ok(WORDS.join("").startsWith(text) && /\d$/.test(text), text);
  assert.equal(shown.at(-1)[1], WORDS.join(""));
  const [half] = shown.find(([, text]) => text.length >= WORDS.join("").length / 2);
  assert.ok(half >= 66 && half <= 300, `half of it after ${half} ms`);
});

test("a revision takes back what it replaces", async () => {
  const clock = new Clock();
  const steps = [[0, "one"], [0, " two"], [2000, { type: "Revision", replaces: 1, text: " zwei" }]];
  const shown = await clock.run(shownOf(scripted(steps, clock), clock.pace, clock));
  assert.equal(shown.at(-1)[1], "one zwei");
  assert.ok(shown.some(([, text]) => text === "one two"));
});

test("it is off when it is told so, and for what was seen before a reload", async () => {
  for (const change of [{ off: true }, { seen: 60 }]) {
    const clock = new Clock();
    const reading = Object.assign(scripted(WORDS.map((word) => [7, word]), clock), { seen: change.seen ?? 0 });
    const shown = await clock.run(shownOf(reading, { ...clock.pace, ...change }, clock));
    assert.equal(shown.at(-1)[1], WORDS.join(""));
    assert.equal(clock.nowMs, 7);
  }
});

test("an error of the stream comes when all before it is shown", async () => {
  const clock = new Clock();
  const reading = scripted([[0, "a b c"]], clock);
  const broken = {
    seen: 0,
    get content() { return reading.content; },
    async *[Symbol.asyncIterator]() {
      yield* reading;
      throw passing();
    },
  };
  const shown = [];
  const read = async () => { for await (const text of smooth(broken, clock.pace)) shown.push(text); };
  await assert.rejects(clock.run(read()), { code: "unavailable" });
  assert.equal(shown.at(-1), "a b c");
});

// ---- errors ----

test("an edge that a page of another origin cannot reach names the setting that admits it", (t) => {
  assert.equal(unreachable("https://edge.example/v1/generate", "refused").hint, null); // no page
  globalThis.location = new URL("https://app.example/chat");
  t.after(() => delete globalThis.location);
  const { code, retryable, hint } = unreachable("wss://edge.example/v1/ws", "refused");
  assert.deepEqual([code, retryable], ["edge_unreachable", true]);
  assert.match(hint, /https:\/\/app\.example has to be in its edge\.allowed_origins/);
  assert.equal(unreachable("wss://app.example/v1/ws", "refused").hint, null);
});
