// Anthropic's SDK of npm against two edges: cut off behind each event, and gone on with at the other edge.
// node anthropic.mjs MAJOR EDGE OTHER_EDGE ASKED

import { anthropic } from "./majors.mjs";

const [major, edge, other, request] = process.argv.slice(2);
const Anthropic = await anthropic(major);
const [here, there] = [edge, other].map((baseURL) => new Anthropic({ baseURL, apiKey: "unused", maxRetries: 0 }));
const asked = JSON.parse(request);
const AT_A_TIME = 8;

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

async function cut(point) {
  const events = [];
  for await (const event of await here.messages.create({ ...asked, stream: true })) {
    events.push(event);
    if (events.length > point) break; // which closes the connection
  }
  const path = `/v1/messages/${events[0].message.id}?starting_after=${point}`;
  return [...events, ...(await all(await there.get(path, { stream: true })))];
}

/** An event without what differs from stream to stream. */
function withoutId(event) {
  if (event.message) return { ...event, message: { ...event.message, id: "" } };
  if (event.delta?.type === "signature_delta") return { ...event, delta: {} };
  // How much of a prompt is in the cache depends on the streams before it.
  if (event.type === "message_delta") return { ...event, usage: {} };
  return event;
}

async function refusal(change) {
  try {
    await here.messages.create({ ...asked, ...change });
  } catch (error) {
    const { type, message } = error.error.error;
    return [error.constructor.name, error.status, type, message, error.requestID === error.error.request_id];
  }
  return [];
}

/** The tokens of the request, or the type of the error. */
async function counted() {
  const { model, messages, tools } = asked;
  try {
    return (await there.messages.countTokens({ model, messages, tools })).input_tokens;
  } catch (error) {
    return error.error.error.type;
  }
}

const events = await all(await here.messages.create({ ...asked, stream: true }));
const expected = JSON.stringify(events.map(withoutId));
const broken = [];
for (let at = 0; at < events.length; at += AT_A_TIME) {
  const points = events.map((_, point) => point).slice(at, at + AT_A_TIME);
  const got = await Promise.all(points.map(cut));
  points.forEach((point, i) => {
    if (JSON.stringify(got[i].map(withoutId)) !== expected) broken.push(point);
  });
}

const blocks = [];
const helper = here.messages.stream(asked).on("contentBlock", (block) => blocks.push(block));
let text = "";
helper.on("text", (delta) => (text += delta));
const final = await helper.finalMessage();
const whole = await here.messages.create(asked);
console.log(
  JSON.stringify({
    types: events.map(({ type }) => type),
    events,
    text,
    blocks,
    final,
    whole,
    again: await there.get(`/v1/messages/${final.id}`),
    broken,
    counted: await counted(),
    request_id: Boolean(whole._request_id),
    refusals: [
      await refusal({ model: "gpt" }),
      await refusal({ max_tokens: 0 }),
      await refusal({ messages: [{ role: "user", content: [{ type: "image" }] }] }),
    ],
  }),
);
