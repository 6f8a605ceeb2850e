// The transport of tailrace/ai-sdk under the chat of the AI SDK: real edges, connections that break.
// node --experimental-websocket transport.mjs MAJOR EDGE OTHER_EDGE

import { TailraceChatTransport } from "../../edge/web/tailrace/ai-sdk.js";
import { chatUrl, follow } from "../../edge/web/tailrace/chats.js";
import { SILENCE_MS, system as theSystem } from "../../edge/web/tailrace/connection.js";
import { CUT, breaking } from "../web/breaking.js";
import { chatOf } from "./chat.mjs";
import { aiSdk, reactChat } from "./majors.mjs";

const [major, edge, other] = process.argv.slice(2);
const Plain = chatOf(await aiSdk(major));
const Chat = await reactChat(major);
const FUNCTIONS = ["add", "now"].map((name) => ({ type: "function", function: { name } }));
const QUESTION = { text: "What is 12 + 30?" };
const COUNT = { text: "Count, and wait." };
const ASKED = { id: "u1", role: "user", parts: [{ type: "text", ...COUNT }] };
const QUICK = { leastMs: 1, mostMs: 50, patienceMs: 30_000 };
const same = (raw) => [raw];

/** A chat whose connections break as `alter` says; `requests` are those that were sent. */
function chatWith({ alter = same, fetch: asked, id, messages, url = edge, onFinish, ...options }) {
  const { system, seen } = breaking(alter);
  const requests = [];
  const send = system.fetch;
  system.fetch = async (to, init = {}) => {
    requests.push({ path: new URL(to).pathname, ...init });
    return asked ? asked(to, init, send) : send(to, init);
  };
  const transport = new TailraceChatTransport({ url, backoff: QUICK, system, ...options });
  const chat = new Chat({ id, messages, transport, onFinish });
  const cancels = () => requests.filter(({ path }) => path.endsWith("/cancel")).length;
  return { chat, transport, requests, seen, cancels };
}

const textOf = (message) => message?.parts.map(({ text }) => text ?? "").join("") ?? "";
const last = (chat) => textOf(chat.messages.at(-1));
const about = async (id) => (await fetch(`${other}/v1/generate/${id}`)).json();
async function until(holds) {
  while (!(await holds())) await new Promise((ring) => setTimeout(ring, 5));
}
const counted = (chat) => until(() => last(chat).endsWith("39, ") || chat.error);

let chats = 0;
const newId = () => `transport-${major}-${++chats}`;

/** Reasoning, text and two calls of tools, cut before every frame, once or twice. */
async function cut() {
  const body = { tools: FUNCTIONS };
  const plain = new Plain({ id: newId(), url: edge, body });
  await plain.sendMessage(QUESTION);
  const ends = [];
  const asked = async (alter, transport) => {
    const onFinish = ({ finishReason }) => ends.push(finishReason);
    const made = chatWith({ id: newId(), body, alter, transport, onFinish });
    await made.chat.sendMessage(QUESTION);
    return made;
  };
  let frames = 0;
  const counting = (raw, frame) => {
    frames = Math.max(frames, frame.index + 1);
    return [raw];
  };
  const whole = (await asked(counting)).chat;
  const parts = [whole.messages.at(-1).parts];
  const kept = structuredClone(whole.messages); // by a page that is reloaded in the middle of a call
  kept[1].parts = kept[1].parts.slice(0, 4);
  Object.assign(kept[1].parts[3], { state: "input-streaming", input: undefined });
  const reloaded = chatWith({ id: whole.id, messages: kept, url: other }).chat;
  await reloaded.resumeStream();
  parts.push(reloaded.messages.at(-1).parts);
  const connections = [];
  for (const transport of ["fetch", "auto", "websocket"]) {
    for (let at = 0; at < frames; at++) {
      const { chat, seen } = await asked(
        (raw, frame, connection) => (connection < 2 && frame.index === at + connection ? CUT : [raw]),
        transport,
      );
      parts.push(chat.messages.at(-1)?.parts ?? chat.error?.message);
      connections.push(seen.connections);
    }
  }
  return { plain: plain.messages.at(-1).parts, parts, frames, connections, ends: [...new Set(ends)] };
}

/** A page that is reloaded while its answer is made, and one that comes after it was stopped. */
async function resumed() {
  const id = newId();
  const first = chatWith({ id });
  const sent = first.chat.sendMessage(COUNT);
  await counted(first.chat);
  const stream = first.transport.streamOf(id).id;
  const kept = structuredClone(first.chat.messages);
  Object.assign(kept[1].parts.at(-1), { text: "0, 1, ", state: "streaming" });
  const second = chatWith({
    id, url: other, messages: kept,
    alter: (raw, frame, connection) => (frame.index === 10 * (connection + 1) ? CUT : [raw]),
  });
  const resuming = second.chat.resumeStream();
  await counted(second.chat);
  const before = (await about(stream)).state;
  await first.chat.stop();
  await Promise.all([sent, resuming]);
  await until(async () => (await about(stream)).state === "ended");
  const later = chatWith({ id, url: other, messages: [ASKED] });
  await later.chat.resumeStream();
  await later.chat.resumeStream();
  return {
    texts: [first, second, later].map(({ chat }) => chat.messages.slice(1).map(textOf)),
    ids: [first, second, later].map(({ chat }) => chat.messages[1].id === `msg_${stream}`),
    statuses: [first, second, later].map(({ chat }) => chat.status),
    cancels: [first, second, later].map(({ cancels }) => cancels()),
    connections: second.seen.connections,
    before,
    reason: (await about(stream)).finish_reason,
  };
}

/** A stop that leaves, and cancels nothing until the stream itself is told to. */
async function left() {
  const id = newId();
  const { chat, transport, cancels } = chatWith({ id, stop: "leave" });
  const sent = chat.sendMessage(COUNT);
  await counted(chat);
  await chat.stop();
  await sent;
  const stream = transport.streamOf(id);
  const seen = { state: stream.state, cancels: cancels(), running: (await about(stream.id)).state };
  await stream.cancel();
  return { ...seen, status: chat.status, reason: (await about(stream.id)).finish_reason };
}

/** Effects that run twice: whoever resumes twice, or leaves while it looks for the stream, cancels nothing. */
async function twice() {
  const id = newId();
  const first = chatWith({ id });
  const sent = first.chat.sendMessage(COUNT);
  await counted(first.chat);
  const gone = chatWith({
    id, url: other, messages: [ASKED],
    fetch(url, init, send) {
      gone.stopping ??= gone.chat.stop();
      return send(url, init);
    },
  });
  await gone.chat.resumeStream();
  await gone.stopping;
  const { chat, transport, cancels } = chatWith({ id, url: other, messages: [ASKED] });
  const resuming = [chat.resumeStream()];
  const stopping = chat.stop();
  resuming.push(chat.resumeStream());
  resuming.push(chat.resumeStream());
  await stopping;
  await counted(chat);
  const before = transport.streamOf(id);
  resuming.push(chat.resumeStream()); // while the one before it is read
  await until(() => transport.streamOf(id) !== before && transport.streamOf(id)?.nextIndex === 40);
  const stream = first.transport.streamOf(id);
  const running = (await about(stream.id)).state;
  const cancelled = cancels() + gone.cancels();
  await chat.stop();
  await Promise.all([sent, ...resuming]);
  return { running, before: cancelled, after: cancels(), texts: chat.messages.map(textOf), reason: (await about(stream.id)).finish_reason };
}

/** A stop before the edge has answered, and an answer that is lost on its way. */
async function early() {
  const id = newId();
  let made = null;
  made = chatWith({
    id,
    fetch: async (url, init, send) => {
      if (url.endsWith("/api/chat")) made.stopping = made.chat.stop();
      return send(url, init);
    },
  });
  await made.chat.sendMessage(COUNT);
  await made.stopping;
  const stream = made.transport.streamOf(id);
  const { status, messages } = made.chat;
  await until(() => stream.id);
  await until(async () => (await about(stream.id)).state === "ended");
  const streams = [];
  const lost = chatWith({
    id: newId(),
    body: { tools: FUNCTIONS },
    fetch: async (url, init, send) => {
      const response = await send(url, init);
      if (init.method === "POST") streams.push(response.headers.get("Tailrace-Stream"));
      if (streams.length > 1 || init.method !== "POST") return response;
      await response.body.cancel();
      throw new TypeError("network error");
    },
  });
  await lost.chat.sendMessage(QUESTION);
  return {
    status, messages: messages.length,
    reason: (await about(stream.id)).finish_reason,
    lost: { asked: streams.length, streams: new Set(streams).size, parts: lost.chat.messages.at(-1).parts.length },
  };
}

/** What is sent, and what is refused. */
async function told() {
  const id = newId();
  const { chat, requests } = chatWith({
    id, apiKey: "key",
    headers: async () => ({ "X-Own": "1" }),
    body: () => ({ model: "nobody" }),
  });
  await chat.sendMessage(QUESTION, { headers: { "X-More": "2" } });
  const file = chatWith({ id: newId() });
  await file.chat.sendMessage({ text: "x", files: [{ type: "file", mediaType: "image/png", url: "data:," }] });
  const headers401 = { "Content-Type": "text/plain; charset=utf-8" };
  const keyless = chatWith({ id: newId(), fetch: () => new Response("no API key", { status: 401, headers: headers401 }) });
  await keyless.chat.sendMessage(QUESTION);
  const nothing = chatWith({ id: newId(), messages: [ASKED] });
  await nothing.chat.resumeStream();
  const faults = [];
  const stopped = chatWith({
    id: newId(),
    onStopError: ({ code }, chatId) => faults.push([code, chatId === stopped.chat.id]),
    fetch: (url, init, send) =>
      url.endsWith("/cancel") ? Response.json({ error: { code: "forbidden" } }, { status: 403 }) : send(url, init),
  });
  const sent = stopped.chat.sendMessage(COUNT);
  await counted(stopped.chat);
  await stopped.chat.stop();
  await sent;
  await until(() => faults.length);
  await fetch(`${edge}/v1/generate/${stopped.transport.streamOf(stopped.chat.id).id}/cancel`, { method: "POST" });
  const [{ headers, body }] = requests;
  return {
    headers: [headers.Authorization, headers["X-Own"], headers["x-more"]],
    body: [JSON.parse(body).id === id, JSON.parse(body).model, JSON.parse(body).trigger],
    refused: [chat.status, chat.error?.code, chat.error?.status],
    file: [file.chat.status, file.chat.error?.message],
    keyless: [keyless.chat.error?.status, keyless.chat.error?.message],
    nothing: [nothing.chat.status, nothing.chat.messages.length],
    faults,
  };
}

/** Two devices that follow one chat: each shows what the other asks for, and stops it. */
async function followed() {
  const id = newId();
  const [one, two] = [chatWith({ id }), chatWith({ id, url: other })];
  const abort = new AbortController();
  const turns = { one: [], two: [] };
  const readers = [];
  const follow = ({ chat, transport }, name) =>
    transport.follow(id, {
      signal: abort.signal,
      onPresence: (count) => readers.push(count),
      onTurn(turn) {
        turns[name].push(turn.stream);
        chat.resumeStream();
      },
    });
  const following = [follow(one, "one"), follow(two, "two")];
  await until(() => readers.filter((count) => count === 2).length === 2);
  const streams = [];
  const stopped = [];
  for (const [asking, seeing] of [[one, two], [two, one]]) {
    const sent = asking.chat.sendMessage(COUNT);
    await until(() => asking.transport.streamOf(id)?.id && !streams.includes(asking.transport.streamOf(id).id));
    streams.push(asking.transport.streamOf(id).id);
    await until(() => seeing.transport.streamOf(id)?.id === streams.at(-1));
    await counted(asking.chat);
    await counted(seeing.chat);
    stopped.push(...(await seeing.transport.stopChat(id)).map(({ stream }) => stream));
    await sent;
    await until(() => seeing.chat.status === "ready");
  }
  const none = await one.transport.stopChat(id);
  abort.abort();
  await Promise.all(following);
  return {
    streams, turns, stopped, none,
    texts: [one, two].map(({ chat }) => chat.messages.filter(({ role }) => role === "assistant").map(textOf)),
    reasons: await Promise.all(streams.map(async (stream) => (await about(stream)).finish_reason)),
  };
}

/** Create a chat of four turns, and return the ids of their streams. */
async function fourTurns(id) {
  const asked = { model: "adder", messages: [{ role: "user", content: "1 + 2" }], chat: id };
  const streams = [];
  for (let turn = 0; turn < 4; turn++) {
    const answer = await fetch(`${edge}/v1/generate`, { method: "POST", body: JSON.stringify(asked) });
    streams.push((await answer.json()).id);
  }
  return streams;
}

/** The turns of a chat, whose connection is cut after each of its lines. */
async function turns() {
  const id = newId();
  const streams = await fourTurns(id);
  const read = [];
  for (let cutAfter = 0; cutAfter < streams.length; cutAfter++) {
    let connections = 0;
    const system = {
      ...theSystem,
      async fetch(url, init) {
        const response = await fetch(url, init);
        return connections++ ? response : new Response(response.body.pipeThrough(cutBehind(cutAfter)));
      },
    };
    const abort = new AbortController();
    const found = [];
    for await (const event of follow(chatUrl(edge, id), { system, backoff: QUICK, signal: abort.signal })) {
      if (event.type === "turn") found.push(event.stream);
      if (found.length === streams.length) abort.abort();
    }
    read.push({ found, connections });
  }
  const fresh = newId();
  const first = (await follow(chatUrl(edge, fresh), { backoff: QUICK }).next()).value;
  const refused = await follow(chatUrl(edge, "a/b"), { backoff: QUICK }).next().catch(({ status }) => status);
  return { streams, read, first, refused };
}

/** Passes on that many lines, and then breaks. */
function cutBehind(lines) {
  let left = lines;
  return new TransformStream({
    transform(chunk, controller) {
      for (const byte of chunk) {
        if (!left) return controller.error(new TypeError("network error"));
        controller.enqueue(new Uint8Array([byte]));
        left -= byte === 10;
      }
      if (!left) controller.error(new TypeError("network error"));
    },
  });
}

/** The turns of a chat, whose connection brings nothing after the first one until it is given up.
 * The next attempt is due in an hour, but the network comes back.
 */
async function woken() {
  const id = newId();
  const streams = await fourTurns(id);
  const read = {};
  for (const fault of ["silence", "cut"]) {
    const heard = { connections: 0, waits: 0, listens: 0 };
    let wake = () => {};
    const faults = {};
    const system = {
      ...theSystem,
      async fetch(url, init) {
        const response = await fetch(url, init);
        return heard.connections++ ? response : new Response(response.body.pipeThrough(silentBehind(1)));
      },
      setTimer(ring, ms) {
        if (ms === SILENCE_MS) {
          faults.silence = ring;
          return ring;
        }
        heard.waits++;
        queueMicrotask(wake);
        return theSystem.setTimer(ring, ms);
      },
      clearTimer(timer) {
        if (timer === faults.silence) delete faults.silence;
        else theSystem.clearTimer(timer);
      },
      onWake(woken, cut) {
        heard.listens++;
        wake = woken;
        faults.cut = cut;
        return () => heard.listens--;
      },
    };
    const abort = new AbortController();
    const found = [];
    const backoff = { leastMs: 3_600_000, mostMs: 3_600_000, patienceMs: 36_000_000 };
    for await (const event of follow(chatUrl(edge, id), { system, backoff, signal: abort.signal })) {
      if (event.type !== "turn") continue;
      found.push(event.stream);
      if (found.length === 1) faults[fault]();
      if (found.length === streams.length) abort.abort();
    }
    read[fault] = { found, ...heard };
  }
  return { streams, read };
}

/** Passes on that many lines that are turns, and then nothing. */
function silentBehind(lines) {
  let left = lines;
  let line = "";
  return new TransformStream({
    transform(chunk, controller) {
      for (const byte of chunk) {
        if (!left) return;
        line += String.fromCharCode(byte);
        controller.enqueue(new Uint8Array([byte]));
        if (byte !== 10) continue;
        left -= JSON.parse(line).type === "turn";
        line = "";
      }
    },
  });
}

const cases = { cut, resumed, left, twice, early, told, followed, turns, woken };
const found = {};
for (const [name, act] of Object.entries(cases)) found[name] = await act();
console.log(JSON.stringify(found));
process.exit(0);
