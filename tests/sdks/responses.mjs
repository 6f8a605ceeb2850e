// Responses by the SDK of npm: cut off behind each of the numbers, and gone on with at the other edge.
// node responses.mjs MAJOR EDGE OTHER_EDGE N,N,…

import { openAi } from "./majors.mjs";

const [major, edge, other, points] = process.argv.slice(2);
const OpenAI = await openAi(major);
const [here, there] = [edge, other].map(
  (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 }),
);
const ASKED = {
  model: "demo",
  input: "Once upon a time",
  max_output_tokens: 60,
  temperature: 0.8,
  seed: 7,
  ignore_eos: true,
};

async function cut(point) {
  const events = [];
  for await (const event of await here.responses.create({ ...ASKED, stream: true })) {
    events.push(event);
    if (event.sequence_number === point) break; // which closes the connection
  }
  const id = events[0].response.id;
  const rest = await there.responses.retrieve(id, { stream: true, starting_after: point });
  for await (const event of rest) events.push(event);
  const deltas = events.filter(({ type }) => type === "response.output_text.delta");
  const [message] = events.at(-1).response.output;
  return {
    point,
    numbers: events.map(({ sequence_number }) => sequence_number),
    text: deltas.map(({ delta }) => delta).join(""),
    final: message.content[0].text,
  };
}

async function helper() {
  const stream = here.responses.stream({ ...ASKED });
  const response = await stream.finalResponse();
  return { text: response.output_text, parsed: response.status === "incomplete" };
}

async function missing() {
  try {
    await here.responses.retrieve("resp_nothing");
  } catch (error) {
    return { status: error.status, code: error.code, param: error.param };
  }
}

const cuts = await Promise.all(points.split(",").map((point) => cut(Number(point))));
console.log(JSON.stringify({ cuts, helper: await helper(), missing: await missing() }));
