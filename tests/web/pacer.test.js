// The pace of a reader: what is shown is a prefix of what has arrived, at its time, and all in the end.

import assert from "node:assert/strict";
import { test } from "node:test";
import { announcer } from "../../edge/web/tailrace/announcer.js";
import { MOST_BEHIND_CHARS, Pace, paced } from "../../edge/web/tailrace/pace.js";
import { GRANULARITIES, MOST_UNIT_CHARS, Pacer } from "../../edge/web/tailrace/pacer.js";
import { choose, seeded } from "./random.js";

const SPEEDS = [1, 60, 240, 2_000, Infinity];
const WORDS = ["Word", "un", "believ", "able", "the", "ein", "3.14", "don't", "\u65e5\u672c", "\u8a9e\u3067", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u{1f468}\u200d\u{1f469}\u200d\u{1f467}", "\u{1f30a}", "e\u0301"];
const ENDS = [" ", " ", " ", ". ", "! ", "\u3002", "\n", "\n\n", "\n \n\n", "", ", ", "\r\n\r\n"];

/** Show all that comes by `steps` of a text, and return [time, visible] for each change. */
function shownBy(pacer, until) {
  const shown = [];
  for (let { due } = pacer; due !== null && due <= until; { due } = pacer) {
    pacer.advance(due);
    shown.push([due, pacer.visible]);
  }
  pacer.advance(until);
  return shown;
}

// ---- one rule at a time ----

test("a speed of 60 words a minute shows a word a second", () => {
  const pacer = new Pacer({ wordsPerMinute: 60, granularity: "word" });
  pacer.feed("one two, three", 0);
  pacer.end(0);
  assert.equal(pacer.visible, "one ");
  assert.deepEqual(shownBy(pacer, 10_000), [[1000, "one two, "], [2000, "one two, three"]]);
});

test("time without text is not made up for, and a late timer is", () => {
  const pacer = new Pacer({ wordsPerMinute: 60, granularity: "word" });
  pacer.feed("one ", 0);
  pacer.feed("one two three four five six", 100_000);
  assert.equal(pacer.visible, "one two ");
  pacer.advance(102_500); // as if the page was frozen
  assert.equal(pacer.visible, "one two three four ");
  assert.equal(pacer.due, 103_000);
});

test("a sentence and a paragraph are shown when they are complete", () => {
  for (const [granularity, first] of [["sentence", "Wave 1 came in. "], ["paragraph", "Wave 1 came in. Wave 2 fell.\n\n"]]) {
    const pacer = new Pacer({ granularity });
    const text = "Wave 1 came in. Wave 2 fell.\n\nThen";
    const seen = new Set();
    for (let end = 1; end <= text.length; end++) {
      pacer.feed(text.slice(0, end), end);
      seen.add(pacer.visible);
    }
    assert.equal([...seen][1], first);
    assert.ok(!pacer.visible.endsWith("Then"));
    pacer.end(100);
    assert.equal(pacer.visible, text);
  }
});

test("the pieces of one word count as one word, in every script", () => {
  const pacer = new Pacer({ wordsPerMinute: 60 });
  for (const text of ["un", "unbeliev", "unbelievable", "unbelievable story"]) pacer.feed(text, 0);
  assert.equal(pacer.visible, "unbelievable");
  assert.equal(pacer.due, 1000);
  const japanese = new Pacer({ wordsPerMinute: 60, granularity: "word", locale: "ja" });
  japanese.feed("\u79c1\u306f\u6771\u4eac\u306b\u4f4f\u3093\u3067\u3044\u307e\u3059\u3002", 0);
  japanese.end(0);
  assert.ok(japanese.visible.length < 3, japanese.visible);
  assert.ok(shownBy(japanese, 60_000).length > 3);
});

test("a pause shows nothing more, and keeps the rest of a wait", () => {
  const pacer = new Pacer({ wordsPerMinute: 60, granularity: "word" });
  pacer.feed("one two three four", 0);
  pacer.pause(400);
  assert.equal(pacer.due, null);
  pacer.feed("one two three four five", 5_000);
  pacer.advance(50_000);
  assert.equal(pacer.visible, "one ");
  pacer.resume(60_000);
  assert.equal(pacer.due, 60_600);
});

test("text that is taken back while paused is not shown", () => {
  const pacer = new Pacer();
  pacer.feed("one two", 0);
  pacer.pause(0);
  pacer.feed("one zwei drei", 1);
  assert.equal(pacer.visible, "one ");
  pacer.resume(2);
  assert.equal(pacer.visible, "one zwei drei");
});

test("a new speed and a new granularity apply at once", () => {
  const pacer = new Pacer({ wordsPerMinute: 60, granularity: "word" });
  pacer.feed("one two three. Four five six. Seven", 0);
  pacer.setSpeed(120, 500);
  assert.equal(pacer.due, 750);
  pacer.setGranularity("sentence", 800);
  assert.deepEqual(shownBy(pacer, 1_300), [[750 + 500, "one two three. "]]);
  pacer.setSpeed(Infinity, 1_300);
  assert.equal(pacer.visible, "one two three. Four five six. ");
  pacer.setGranularity("token", 1_400);
  assert.equal(pacer.visible, "one two three. Four five six. Seven");
});

test("text that waited while paused at full speed gets the speed that is set", () => {
  const pacer = new Pacer({ granularity: "word" });
  pacer.pause(0);
  pacer.feed("one two three ", 0);
  pacer.setSpeed(60, 10);
  pacer.resume(20);
  assert.equal(pacer.visible, "one ");
});

test("catching up shows what has arrived, and releasing also what comes", () => {
  const pacer = new Pacer({ wordsPerMinute: 1 });
  pacer.feed("a b c", 0);
  pacer.feed("a b c d e", 0);
  pacer.catchUp(1);
  assert.equal(pacer.visible, "a b c d e");
  pacer.pause(2);
  pacer.release(3);
  pacer.feed("a b c d e f", 4);
  pacer.feed("a b c d e f g", 4);
  assert.equal(pacer.visible, "a b c d e f g");
  pacer.pause(5);
  assert.equal(pacer.isPaused, false);
});

test("a unit without an end is shown in pieces, and no surrogate pair is divided", () => {
  for (const granularity of ["word", "sentence", "paragraph"]) {
    const pacer = new Pacer({ granularity });
    pacer.feed("x" + "\u{1f30a}".repeat(MOST_UNIT_CHARS), 0);
    assert.ok(pacer.behind <= MOST_UNIT_CHARS, `${granularity}: ${pacer.behind}`);
    assert.ok(pacer.visible.length > 0);
    assert.ok(!/[\ud800-\udbff]$/.test(pacer.visible), granularity);
  }
});

test("values that make no sense are refused, and named", () => {
  for (const wordsPerMinute of [0, -1, NaN]) {
    assert.throws(() => new Pacer({ wordsPerMinute }), { name: "RangeError", message: new RegExp(`is ${wordsPerMinute};`) });
  }
  assert.throws(() => new Pacer({ granularity: "line" }), { message: /line; it has to be one of token, word/ });
  const pacer = new Pacer();
  pacer.end(0);
  assert.throws(() => pacer.feed("x", 0), /after its end/);
});

// ---- any text, in any pieces, with any hand on the pace ----

/** Return the texts of a stream, each longer than the last or with its end replaced. */
function texts(random, length) {
  const all = [];
  let text = "";
  for (let nth = 0; nth < length; nth++) {
    if (random() < 0.08) text = text.slice(0, Math.floor(random() * text.length)) + choose(random, WORDS);
    else text += choose(random, WORDS) + choose(random, ENDS);
    all.push(text);
  }
  return all;
}

test("what is shown is always a prefix of what has arrived, and all of it in the end", () => {
  for (let seed = 1; seed <= 300; seed++) {
    const random = seeded(seed);
    const pacer = new Pacer({ wordsPerMinute: choose(random, SPEEDS), granularity: choose(random, GRANULARITIES) });
    let now = 0;
    let arrived = "";
    let paused = false;
    const check = (grows) => {
      assert.ok(arrived.startsWith(pacer.visible), `seed ${seed}: ${JSON.stringify([pacer.visible, arrived])}`);
      assert.equal(pacer.behind, arrived.length - pacer.visible.length);
      assert.equal(pacer.isPaused, paused);
      if (grows !== undefined) assert.ok(pacer.visible.startsWith(grows), `seed ${seed}: it shrank`);
    };
    for (const text of texts(random, 60)) {
      now += random() * 400;
      const before = pacer.visible;
      switch (Math.floor(random() * 8)) {
        case 0: pacer.pause(now); paused = true; break;
        case 1: pacer.resume(now); paused = false; break;
        case 2: pacer.setSpeed(choose(random, SPEEDS), now); break;
        case 3: pacer.setGranularity(choose(random, GRANULARITIES), now); break;
        case 4: pacer.advance(now); break;
        case 5: if (random() < 0.2) pacer.catchUp(now); break;
        default:
      }
      check(before);
      const still = pacer.visible;
      arrived = text;
      pacer.feed(text, now);
      check();
      if (paused) assert.ok(still.startsWith(pacer.visible), `seed ${seed}: it grew while paused`);
    }
    pacer.end(now);
    check();
    pacer.resume(now);
    for (let { due } = pacer; due !== null; { due } = pacer) pacer.advance(due);
    assert.ok(pacer.isDone && pacer.visible === arrived, `seed ${seed}`);
  }
});

test("the time of each step does not depend on how often the pacer is asked", () => {
  for (let seed = 1; seed <= 100; seed++) {
    const random = seeded(seed);
    const options = { wordsPerMinute: choose(random, SPEEDS), granularity: choose(random, GRANULARITIES) };
    const [seldom, often] = [new Pacer(options), new Pacer(options)];
    let now = 0;
    for (const text of texts(random, 40)) {
      const next = now + random() * 500;
      shownBy(often, next);
      for (let at = now; at < next; at += 37) often.advance(at);
      now = next;
      for (const pacer of [seldom, often]) pacer.feed(text, now);
      assert.equal(seldom.visible, often.visible, `seed ${seed}`);
      assert.equal(seldom.due, often.due, `seed ${seed}`);
    }
  }
});

// ---- with a stream ----

/** A clock whose timers ring when a test says so. */
class Timers {
  nowMs = 0;
  #waiting = new Map();
  #last = 0;
  now = () => this.nowMs;
  setTimer = (ring, ms) => {
    this.#waiting.set(++this.#last, [this.nowMs + ms, ring]);
    return this.#last;
  };
  clearTimer = (timer) => void this.#waiting.delete(timer);

  /** Let the time pass, with all that happens in it. */
  async pass(ms) {
    const until = this.nowMs + ms;
    for (;;) {
      await settled();
      const [first] = [...this.#waiting].sort(([, [a]], [, [b]]) => a - b);
      if (!first || first[1][0] > until) break;
      this.#waiting.delete(first[0]);
      this.nowMs = Math.max(this.nowMs, first[1][0]);
      first[1][1]();
    }
    this.nowMs = until;
  }
}

const settled = () => new Promise((resolve) => setImmediate(resolve));

/** A stream whose frames are all there. It counts those that are taken, which is what gives credit. */
function streamOf(pieces, { failAt = -1, seen = 0 } = {}) {
  const reading = {
    seen, content: "", taken: 0, state: "open", error: null, reconnects: 0, isLeft: false,
    reconnect() { this.reconnects += 1; this.state = "open"; },
    [Symbol.asyncIterator]: () => ({
      next: async () => {
        if (reading.taken === failAt) throw new Error("broken");
        if (reading.taken === pieces.length) return { value: undefined, done: true };
        const index = reading.taken++;
        reading.content += pieces[index];
        return { value: { type: "Token", text: pieces[index], index }, done: false };
      },
      return: async () => { reading.isLeft = true; return { value: undefined, done: true }; },
    }),
  };
  return reading;
}

/** Collect what a stream shows; `error` is what it throws in the end. */
function follow(reading, pace) {
  const followed = { shown: [], isOver: false, error: null };
  (async () => {
    try {
      for await (const text of paced(reading, pace)) followed.shown.push([pace.isPaused, text]);
    } catch (error) {
      followed.error = error;
    }
    followed.isOver = true;
  })();
  return followed;
}

const PIECES = Array.from({ length: 2_000 }, (_, nth) => ` word${nth}`);

test("a paused reader takes no frames, so that no more credit is given", async () => {
  const timers = new Timers();
  const pace = new Pace({}, timers);
  const reading = streamOf(PIECES);
  pace.pause();
  const followed = follow(reading, pace);
  await timers.pass(60_000);
  assert.equal(reading.taken, 0);
  pace.resume();
  await timers.pass(0);
  assert.equal(followed.shown.at(-1)[1], PIECES.join(""));
  assert.ok(followed.isOver && !followed.error);
});

test("a slow reader is only a little behind what it takes", async () => {
  const timers = new Timers();
  const pace = new Pace({ wordsPerMinute: 600, granularity: "word" }, timers);
  const reading = streamOf(PIECES);
  const followed = follow(reading, pace);
  await timers.pass(10_000); // a hundred words
  const most = pace.visible.length + MOST_BEHIND_CHARS + PIECES.at(-1).length;
  assert.ok(reading.content.length <= most && reading.taken < PIECES.length / 2, `${reading.taken} frames`);
  assert.equal(pace.visible.match(/\w+/g).length, 101);
  pace.wordsPerMinute = Infinity;
  await timers.pass(0);
  assert.equal(followed.shown.at(-1)[1], PIECES.join(""));
});

test("a paragraph that is longer than the room is shown, and read to its end", async () => {
  const timers = new Timers();
  const followed = follow(streamOf(PIECES), new Pace({ granularity: "paragraph" }, timers));
  await timers.pass(0);
  assert.equal(followed.shown.at(-1)[1], PIECES.join(""));
  assert.ok(followed.isOver);
});

test("a connection that the server closed during a pause is opened again", async () => {
  const timers = new Timers();
  const pace = new Pace({}, timers);
  const reading = streamOf(PIECES);
  pace.pause();
  follow(reading, pace);
  await timers.pass(1);
  Object.assign(reading, { state: "failed", error: { retryable: true } });
  pace.resume();
  await timers.pass(1);
  assert.equal(reading.reconnects, 1);
});

test("an error comes when all before it is shown, and leaving ends the reading", async () => {
  const timers = new Timers();
  const pace = new Pace({ wordsPerMinute: 60, granularity: "word" }, timers);
  const followed = follow(streamOf(PIECES, { failAt: 3 }), pace);
  await timers.pass(1_500);
  assert.equal(followed.error, null);
  await timers.pass(10_000);
  assert.deepEqual([followed.error.message, followed.shown.at(-1)[1]], ["broken", PIECES.slice(0, 3).join("")]);
  const left = streamOf(PIECES);
  for await (const text of paced(left, new Pace({}, timers))) if (text) break;
  assert.ok(left.isLeft);
});

test("text that was seen before a reload is shown at once, and releasing shows the rest", async () => {
  const timers = new Timers();
  const pace = new Pace({ wordsPerMinute: 60, granularity: "word" }, timers);
  const reading = streamOf(PIECES.slice(0, 60), { seen: 50 });
  const followed = follow(reading, pace);
  await timers.pass(500);
  const { length } = pace.visible.match(/\w+/g);
  assert.ok(length >= 49 && length <= 51, `${length} words`);
  pace.release();
  await timers.pass(0);
  assert.equal(followed.shown.at(-1)[1], PIECES.slice(0, 60).join(""));
  pace.begin();
  pace.feed("a b c d");
  assert.equal(pace.visible, "a "); // the settings apply again
});

// ---- for screen readers ----

class Region {
  attributes = {};
  children = [];
  ownerDocument = { createElement: () => { const made = { textContent: "", remove: () => this.children.splice(this.children.indexOf(made), 1) }; return made; } };
  setAttribute(name, value) { this.attributes[name] = value; }
  append(child) { this.children.push(child); }
  get childElementCount() { return this.children.length; }
  get firstElementChild() { return this.children[0]; }
  get said() { return this.children.map(({ textContent }) => textContent); }
}

test("a screen reader hears whole sentences, each once", () => {
  const region = new Region();
  const { update, skip } = announcer(region);
  assert.deepEqual(region.attributes, { "aria-live": "polite", role: "log" });
  const text = "Known already. Wave 1 came in. Was it 3.5 m high? And then";
  skip("Known already. ");
  for (let end = 16; end <= text.length; end++) update(text.slice(0, end));
  assert.deepEqual(region.said, ["Wave 1 came in.", "Was it 3.5 m high?"]);
  update(text, true);
  assert.equal(region.said.at(-1), "And then");
});

test("a revision is announced from where it begins", () => {
  const region = new Region();
  const { update } = announcer(region);
  update("One is here. Two is bad. Three");
  update("One is here. Zwei is good. Three");
  assert.deepEqual(region.said, ["One is here. Two is bad.", "Zwei is good."]);
});

test("paragraphs are announced if they were asked for, and old announcements go", () => {
  const region = new Region();
  const { update } = announcer(region, { granularity: "paragraph" });
  let text = "";
  for (let nth = 0; nth < 50; nth++) update((text += `One. Two ${nth}.\n\n`));
  assert.equal(region.said.length, 20);
  assert.equal(region.said.at(-1), "One. Two 49.");
});
