// What can go wrong between a page and an edge, done to real streams of a real edge.
//
// Run by Node.js and by pages in browsers: nothing here is of one of them. `world` tells where the
// edge is, and does what a page cannot: kill it, start it, hold each stream in its middle.

import { branch } from "../../edge/web/tailrace/branch.js";
import { resume, stream } from "../../edge/web/tailrace/index.js";
import { CUT, breaking } from "./breaking.js";

export const TOKENS = 40;
export const INPUT = {
  model: "demo", prompt: "Once upon a time", max_tokens: TOKENS, temperature: 0.8, seed: 21, ignore_eos: true,
};
const LONG = { ...INPUT, max_tokens: 450 };
const QUICK = { leastMs: 1, mostMs: 50, patienceMs: 60_000 };
const TRANSPORTS = ["fetch", "websocket"];
/** A clock that runs twenty times as fast, for the timeouts of seconds. */
const FAST = {
  now: () => 20 * performance.now(),
  setTimer: (ring, ms) => setTimeout(ring, ms / 20),
};

function equal(got, wanted, what) {
  const [a, b] = [JSON.stringify(got), JSON.stringify(wanted)];
  if (a !== b) throw new Error(`${what}: ${a?.slice(0, 400)} is not ${b?.slice(0, 400)}`);
}

function check(holds, what) {
  if (!holds) throw new Error(what);
}

async function all(reading) {
  const frames = [];
  for await (const frame of reading) frames.push(frame);
  return frames;
}

async function refusal(promise) {
  return promise.then((value) => { throw new Error(`it gave ${JSON.stringify(value)}`); }, (error) => error);
}

const same = (raw) => [raw];

/** A map with the words of the platform's storages. */
function memory() {
  const values = new Map();
  return {
    getItem: (key) => values.get(key) ?? null,
    setItem: (key, value) => void values.set(key, value),
    removeItem: (key) => void values.delete(key),
  };
}

/** What holds of each transport. */
function withTransport(transport) {
  const of = (world, options) => ({ transport, backoff: QUICK, ...options });
  const again = (world, options) => stream(`${world.generate}/${world.id}`, of(world, options));

  return {
    async "a late reader gets the text so far as one frame"(world) {
      const late = again(world, { snapshot: true });
      const frames = await all(late);
      equal(frames.map(({ type }) => type), ["Snapshot", "StreamEnd"], "frames");
      equal([frames[0].first, frames[0].text, late.content], [0, world.text, world.text], "text");
      equal(frames[1].index, frames[0].index + 1, "the end follows");
    },

    async "a late reader begins with the newest frames, and is resumed by index"(world) {
      const newest = world.frames.slice(-5);
      const indexes = [[], []];
      const { system } = breaking((raw, frame, connection) => {
        if (!("index" in frame)) return [raw];
        if (connection === 0 && frame.index === newest[3].index) return CUT;
        indexes[connection].push(frame.index);
        return [raw];
      });
      equal(await all(again(world, { system, tail: 5 })), newest, "frames");
      equal(indexes.flat(), newest.map(({ index }) => index), "frames that came");
      const last = again(world, { tail: 3, snapshot: true });
      equal((await all(last)).map(({ type }) => type), ["Snapshot", "StreamEnd"], "with a snapshot");
      equal(last.content, world.frames.slice(-3).map(({ text }) => text ?? "").join(""), "text");
      equal(await all(again(world, { tail: 1000 })), world.frames, "more than there are");
    },

    async "a late reader begins at a time"(world) {
      for (const since of [1e12, "1000000000000", "1970-01-01T01:00:00+01:00"]) {
        equal(await all(again(world, { since })), world.frames, `since ${since}`);
      }
      const late = again(world, { since: Date.now() + 3_600_000 });
      equal([await all(late), late.state], [[], "ended"], "since a time to come");
    },

    async "a wrong beginning is refused, and the error names the field"(world) {
      for (const [options, field] of [
        [{ after: 1, tail: 2 }, "tail"],
        [{ after: 0, since: 1e12 }, "since"],
        [{ tail: 2, since: 1e12 }, "tail"],
        [{ tail: 0 }, "tail"],
        [{ tail: 1.5 }, "tail"],
        [{ since: "yesterday" }, "since"],
        [{ since: "2026-11-28T09:30:00" }, "since"],
        [{ since: -1 }, "since"],
        [{ since: 1e9 }, "since"], // seconds
      ]) {
        const error = await refusal(again(world, options).text());
        check(!error.retryable && error.field.includes(field), `${JSON.stringify(options)}: ${JSON.stringify(error)}`);
      }
    },

    async "a new stream comes whole"(world) {
      const states = [];
      const reading = stream(world.generate, of(world, {
        input: INPUT, onState: (state) => states.push(state),
      }));
      const frames = await all(reading);
      equal(frames.filter(({ text }) => text).map(({ text }) => text).join(""), world.text, "text");
      equal(frames.map(({ index }) => index), frames.map((_, nth) => nth), "indexes");
      equal(reading.end.total_tokens, TOKENS, "total");
      equal(states, ["connecting", "open", "ended"], "states");
      equal(reading.transport, transport, "transport");
      check(/^[0-9a-f]{32}$/.test(reading.id) && reading.token, "an id and a token");
      equal(await again(world).text(), world.text, "text()");
      const chunks = [];
      const reader = again(world).readable.getReader();
      for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) chunks.push(value);
      equal(chunks, world.frames, "readable");
    },

    async "cut at every frame"(world) {
      for (let at = 0; at < world.frames.length; at++) {
        const { system, seen } = breaking((raw, frame, connection) =>
          connection === 0 && frame.index === at ? CUT : [raw]);
        const reading = again(world, { system });
        equal(await all(reading), world.frames, `cut at ${at}`);
        // A fetch that is cut before its first frame has been opened all the same.
        equal([seen.connections, reading.resumes], [2, 1], `connections when cut at ${at}`);
      }
    },

    async "frames that come twice"(world) {
      let before = [];
      const { system, seen } = breaking((raw, frame) => {
        if (!("index" in frame) || frame.type === "StreamEnd") return [raw];
        before = [...before.slice(-3), raw];
        return [...before, raw];
      });
      equal(await all(again(world, { system })), world.frames, "frames");
      equal(seen.connections, 1, "connections");
    },

    async "frames in another order"(world) {
      let held = null;
      let isDone = false;
      const faults = [];
      const { system } = breaking((raw, frame) => {
        if (isDone) return [raw];
        if (frame.index === 3) { held = raw; return []; }
        isDone = frame.index === 4;
        return isDone ? [raw, held] : [raw];
      });
      const onState = (state, { error }) => state === "waiting" && faults.push(error.code);
      equal(await all(again(world, { system, onState })), world.frames, "frames");
      equal(faults, ["frames_missing"], "faults");
    },

    async "a frame that never comes is an error, and nothing behind it is given"(world) {
      const { system } = breaking((raw, frame) => (frame.index === 5 ? [] : [raw]));
      const reading = again(world, { system, backoff: { ...QUICK, patienceMs: 100 } });
      const got = [];
      const error = await refusal((async () => { for await (const frame of reading) got.push(frame); })());
      equal([error.code, reading.state], ["frames_missing", "failed"], "fault");
      equal(got, world.frames.slice(0, 5), "frames");
    },

    async "bytes that are no frame break the connection only"(world) {
      const { system, seen } = breaking((raw, frame, connection) =>
        connection === 0 && frame.index === 7 ? [new Uint8Array([0, 0, 0, 9, 9])] : [raw]);
      equal(await all(again(world, { system })), world.frames, "frames");
      equal(seen.connections, 2, "connections");
    },

    async "a connection that says nothing any more is left"(world) {
      const faults = [];
      const { system, seen } = breaking((raw, frame, connection) => {
        seen.isSilent ||= connection === 0 && frame.index === 5;
        if (connection > 0) seen.isSilent = false;
        return seen.isSilent ? [] : [raw];
      }, FAST);
      const onState = (state, { error }) => state === "waiting" && faults.push(error.code);
      equal(await all(again(world, { system, onState })), world.frames, "frames");
      equal([faults, seen.connections], [["silent"], 2], "faults");
    },

    async "a page that was frozen leaves no connection"(world) {
      let skew = 0;
      let rang = () => {};
      const ring = () => new Promise((resolve) => { rang = resolve; });
      const { system, seen } = breaking(same, {
        now: () => performance.now() + skew,
        setTimer: (act, ms) => setTimeout(() => { act(); rang(); }, Math.min(ms, 30)),
      });
      // Longer than a window: while nothing is taken it is not over.
      const reading = stream(`${world.generate}/${world.longId}`, of(world, { system }));
      let frames = 0;
      for await (const { index } of reading) {
        equal(index, frames++, "index");
        if (index !== 5) continue;
        for (let came = -1; came !== seen.frames; await ring()) came = seen.frames;
        skew = 3_600_000; // nothing comes, and an hour has gone by when the timer rings
        await ring();
      }
      equal([frames, seen.connections], [world.longFrames, 1], "frames and connections");
    },

    async "retries run out, and reconnect goes on"(world) {
      let isDown = false;
      const { system } = breaking((raw, frame, connection) => {
        if (connection === 0 && frame.index === 9) isDown = true;
        return isDown ? CUT : [raw];
      });
      const reading = again(world, { system, backoff: { ...QUICK, patienceMs: 60 } });
      const got = [];
      const read = async () => { for await (const frame of reading) got.push(frame); };
      const error = await refusal(read());
      check(error.retryable, "retryable");
      equal([reading.state, got.length], ["failed", 9], "state");
      isDown = false;
      reading.reconnect();
      await read();
      equal(got, world.frames, "frames");
    },

    async "who waits is woken when the network is back"(world) {
      let isOffline = false;
      const { system, seen } = breaking((raw, frame, connection) => {
        if (connection === 0 && frame.index === 4) isOffline = true;
        return isOffline ? CUT : [raw];
      });
      // The timer alone would take an hour.
      const reading = again(world, {
        system,
        backoff: { leastMs: 3_600_000, mostMs: 3_600_000, patienceMs: 1e9 },
        onState(state) {
          if (state !== "waiting") return;
          isOffline = false;
          if (globalThis.document) setTimeout(() => dispatchEvent(new Event("online")));
          else setTimeout(() => seen.wake());
        },
      });
      equal(await all(reading), world.frames, "frames");
    },

    async "the network goes, and it waits at once"(world) {
      const { system, seen } = breaking((raw, frame, connection) =>
        // Nothing more comes, and nothing tells of it but the browser.
        connection === 0 && (seen.isSilent ||= frame.index === 5) ? [] : [raw]);
      const states = [];
      const reading = again(world, {
        system,
        onState(state, { error }) {
          states.push([state, error?.code]);
          if (state !== "waiting") return;
          seen.isSilent = false;
          if (globalThis.document) setTimeout(() => dispatchEvent(new Event("online")));
          else setTimeout(() => seen.wake());
        },
      });
      const got = [];
      for await (const frame of reading) {
        got.push(frame);
        if (frame.index !== 4) continue;
        if (globalThis.document) dispatchEvent(new Event("offline"));
        else seen.cut();
      }
      equal(got, world.frames, "frames");
      check(states.some(([state, code]) => state === "waiting" && code === "offline"), `states: ${states}`);
      equal(reading.resumes, 1, "resumes");
    },

    async "a refusal is not tried again"(world) {
      const { system, seen } = breaking(same);
      const states = [];
      const reading = stream(world.generate, of(world, {
        system, input: { ...INPUT, model: "nobody" }, onState: (state) => states.push(state),
      }));
      const error = await refusal(reading.text());
      equal([error.name, error.code, error.status], ["TailraceError", "unknown_model", 404], "error");
      check(error.hint.includes("demo"), `hint: ${error.hint}`);
      equal(states, ["connecting", "failed"], "states");
      check(seen.connections <= 1, "connections");
    },

    async "what cannot be asked says which field"(world) {
      const about = async (input) => (await refusal(stream(world.generate, of(world, { input })).text())).field;
      check((await about({ ...INPUT, max_tokens: "many" })).endsWith("max_tokens"), "max_tokens");
      check((await about({ ...INPUT, temprature: 1 })).endsWith("temprature"), "temprature");
      check((await about({ ...INPUT, temperature: 7 })).endsWith("temperature"), "temperature");
    },

    async "cancel ends it for everybody"(world) {
      await world.control("hold"); // it has not ended before it is cancelled
      const mine = stream(world.generate, of(world, { input: { ...LONG, seed: 5 } }));
      const first = await mine[Symbol.asyncIterator]().next();
      const other = stream(`${world.generate}/${mine.id}`, of(world));
      const others = other.text();
      const status = await mine.cancel();
      await world.control("go-on");
      equal([status.id, first.value.index], [mine.id, 0], "status");
      await Promise.all([others, mine.text()]);
      equal([mine.end.finish_reason, other.end.finish_reason], ["cancelled", "cancelled"], "ends");
    },

    async "detach leaves it running"(world) {
      const abort = new AbortController();
      const reading = stream(world.generate, of(world, { input: { ...INPUT, seed: 6 }, signal: abort.signal }));
      const got = [];
      for await (const frame of reading) {
        got.push(frame);
        if (got.length === 3) abort.abort();
      }
      equal([reading.state, got.length, reading.nextIndex], ["detached", 3, 3], "detached");
      reading.reconnect();
      for await (const frame of reading) got.push(frame);
      equal(got.map(({ index }) => index), got.map((_, nth) => nth), "indexes");
      equal(got.at(-1).finish_reason, "length", "end");
    },

    async "an answer that is lost makes no second stream"(world) {
      const keys = [];
      const ids = [];
      const lost = async (url, init) => {
        const response = await fetch(url, init);
        if (init.method === "POST") {
          keys.push(init.headers["Idempotency-Key"]);
          ids.push(response.headers.get("Tailrace-Stream"));
          if (keys.length === 1) {
            await response.body.cancel();
            throw new TypeError("network error");
          }
        }
        return response;
      };
      const { system, seen } = breaking((raw, frame, connection) => {
        if (frame.type === "Opened") ids.push(frame.stream);
        return connection === 0 && frame.type === "Opened" ? CUT : [raw];
      });
      if (transport === "fetch") system.fetch = lost;
      const reading = stream(world.generate, of(world, { system, input: { ...INPUT, seed: 7 } }));
      equal((await all(reading)).length, world.frames.length, "frames");
      check(ids.length >= 2 && new Set(ids).size === 1, `streams: ${ids}`);
      if (transport === "fetch") check(keys.length === 2 && new Set(keys).size === 1, `keys: ${keys}`);
      else equal(seen.connections, 2, "connections");
    },

    async "a reader that does not read is sent no more than a window"(world) {
      const { system, seen } = breaking(same);
      const reading = stream(`${world.generate}/${world.longId}`, of(world, { system }));
      const iterator = reading[Symbol.asyncIterator]();
      await iterator.next();
      // Another stream over the same connection comes whole meanwhile: had more been sent, it were here.
      equal(await stream(`${world.generate}/${world.id}`, of(world, { system })).text(), world.text, "the other");
      const came = seen.frames - world.frames.length;
      check(came <= 257 + (transport === "fetch" ? 256 : 0), `${came} frames came`);
      equal((await all(reading)).length, world.longFrames - 1, "frames");
    },

    async "a reload finds the stream, from its beginning"(world) {
      const storage = memory();
      const before = stream(world.generate, of(world, { input: { ...INPUT, max_tokens: 100, seed: 8 }, storage }));
      const iterator = before[Symbol.asyncIterator]();
      for (let nth = 0; nth < 5; nth++) await iterator.next();
      // Here the page is gone: nothing of it runs any more, not even a detach.
      const after = resume(world.generate, of(world, { storage }));
      equal(after.id, before.id, "id");
      const frames = await all(after);
      equal(frames.map(({ index }) => index), frames.map((_, nth) => nth), "indexes");
      equal(resume(world.generate, of(world, { storage })).seen, frames.length, "seen");
      equal(await all(before).then((rest) => rest.length), frames.length - 5, "the rest");
      const named = stream(`${world.generate}/${world.id}`, of(world, { storage, key: "named" }));
      await named.text();
      equal(resume(`${world.generate}/${world.id}`, of(world, { storage, key: "named" })).id, world.id, "named");
      after.forget();
      equal(resume(world.generate, of(world, { storage })), null, "forgotten");
    },

    async "a reload before the answer asks again under the same key"(world) {
      const storage = memory();
      const { system } = breaking((raw, frame) => (frame.type === "Opened" ? CUT : [raw]));
      const opened = [];
      system.fetch = async (...request) => {
        const response = await fetch(...request);
        opened.push(response.headers.get("Tailrace-Stream"));
        throw new TypeError("network error");
      };
      const input = { ...INPUT, seed: 9 };
      const before = stream(world.generate, of(world, { system, storage, input, backoff: { patienceMs: 0 } }));
      await refusal(before.text());
      const after = resume(world.generate, of(world, { storage }));
      equal((await all(after)).length, world.frames.length, "frames");
      if (transport === "fetch") equal(after.id, opened[0], "the stream");
    },

    async "a reload before a branch has begun asks for the branch again"(world) {
      const storage = memory();
      const { system } = breaking((raw) => [raw]);
      const opened = [];
      system.fetch = async (url, init) => {
        const response = await fetch(url, init);
        if (init.method === "POST") opened.push(response.headers.get("Tailrace-Stream"));
        throw new TypeError("network error");
      };
      const options = of(world, { system, storage, backoff: { patienceMs: 0 } });
      const before = stream(world.generate, branch(world.generate, { id: world.id }, { index: 3 }, options));
      await refusal(before.text());
      const after = resume(world.generate, of(world, { storage }));
      const frames = await all(after);
      equal(frames.slice(0, 3), world.frames.slice(0, 3), "shared frames");
      equal(after.id, opened[0], "the stream");
    },

    async "an edge is killed"(world) {
      const input = { ...INPUT, max_tokens: 150, seed: 10 };
      const [uncut, reading] = [1, 2].map(() => stream(world.generate, of(world, { input })));
      const got = [];
      await world.control("hold");
      for await (const frame of reading) {
        got.push(frame);
        if (got.length === 20) {
          await world.control("kill");
          await world.control("go-on");
          await world.control("start");
        }
      }
      const wanted = await all(uncut);
      equal(got, wanted, "frames");
      check(reading.resumes > 0, "it was resumed");
    },
  };
}

const CASES = {
  async "many streams share one WebSocket"(world) {
    const { system, seen } = breaking(same);
    const readings = Array.from({ length: 50 }, () =>
      stream(`${world.generate}/${world.id}`, { system, transport: "websocket", backoff: QUICK }));
    const texts = await Promise.all(readings.map((reading) => reading.text()));
    equal(new Set(texts), new Set([world.text]), "texts");
    equal(seen.connections, 1, "connections");
  },

  async "more streams than a browser has connections go over a WebSocket"(world) {
    // Another path to the same edge, so that what is learnt here is learnt for nobody else.
    const url = world.generate.replace("127.0.0.1", "localhost");
    const readings = Array.from({ length: 8 }, () => stream(`${url}/${world.id}`, { backoff: QUICK }));
    const texts = await Promise.all(readings.map((reading) => reading.text()));
    equal([...new Set(texts)], [world.text], "texts");
    const used = readings.map(({ transport }) => transport);
    equal(used.filter((one) => one === "fetch").length, 4, `by fetch, of ${used}`);
  },

  async "the transport that works is remembered"(world) {
    const { system } = breaking(same);
    let tries = 0;
    system.fetch = async () => { tries += 1; throw new TypeError("network error"); };
    const url = `${world.generate}/${world.id}`;
    const first = stream(url, { system, backoff: QUICK });
    equal([await first.text(), first.transport, tries], [world.text, "websocket", 2], "first");
    const second = stream(url, { system, backoff: QUICK });
    equal([await second.text(), second.transport, tries], [world.text, "websocket", 2], "second");
    const { system: without } = breaking(same);
    without.WebSocket = class { constructor() { setTimeout(() => this.onclose?.({ code: 1006 })); } close() {} send() {} };
    const third = stream(url, { system: without, backoff: QUICK });
    equal([await third.text(), third.transport], [world.text, "fetch"], "third");
  },

  async "a reader that takes nothing closes its response, and loses nothing"(world) {
    const { system, seen } = breaking(same, FAST);
    let suspended = () => {};
    const isSuspended = new Promise((resolve) => { suspended = resolve; });
    const onState = (state) => state === "suspended" && suspended();
    const reading = stream(`${world.generate}/${world.longId}`, { system, transport: "fetch", backoff: QUICK, onState });
    const { value: first } = await reading[Symbol.asyncIterator]().next();
    await isSuspended;
    const frames = [first, ...(await all(reading))];
    equal(frames.map(({ index }) => index), frames.map((_, nth) => nth), "indexes");
    equal([frames.length, seen.connections, reading.resumes], [world.longFrames, 2, 1], "frames and connections");
  },

  async "Retry-After of a refusal is waited for"(world) {
    const answers = [new Response(JSON.stringify({ error: { code: "overloaded", message: "", retryable: true } }),
      { status: 503, headers: { "Retry-After": "1" } })];
    const times = [];
    const asking = (...request) => {
      times.push(performance.now());
      return answers.length ? Promise.resolve(answers.shift()) : fetch(...request);
    };
    const { system: broken } = breaking(same);
    broken.fetch = asking;
    equal(await stream(`${world.generate}/${world.id}`, { system: broken, transport: "fetch", backoff: QUICK }).text(), world.text, "text");
    check(times[1] - times[0] >= 1000, `${times[1] - times[0]} ms`);
  },
};

/** Every case by its name. */
export function cases() {
  const named = { ...CASES };
  for (const transport of TRANSPORTS) {
    for (const [name, run] of Object.entries(withTransport(transport))) named[`${transport}: ${name}`] = run;
  }
  return named;
}

/** The world, once it is known what a stream of it holds. */
export async function prepared(world) {
  const reading = stream(world.generate, { input: INPUT, transport: "fetch" });
  world.frames = await all(reading);
  world.id = reading.id;
  const long = stream(world.generate, { input: LONG, transport: "fetch" });
  world.longFrames = (await all(long)).length;
  world.longId = long.id;
  return world;
}

/** Runs all, one after the other; what failed, by name. */
export async function run(world) {
  await prepared(world);
  const failed = {};
  const tookMs = {};
  const named = cases();
  for (const [name, one] of Object.entries(named)) {
    const began = performance.now();
    try {
      await one(world);
    } catch (error) {
      failed[name] = `${error.stack ?? error}`;
    }
    tookMs[name] = Math.round(performance.now() - began);
  }
  return { ran: Object.keys(named).length, failed, tookMs };
}

/** Reads one stream so many times, one after the other. */
export async function oneAfterTheOther(world, count, transport) {
  for (let nth = 0; nth < count; nth++) {
    const text = await stream(`${world.generate}/${world.id}`, { transport }).text();
    equal(text, world.text, "text");
  }
}

