// node chat_completions.mjs MAJOR EDGE CHAT TOOL: what the SDK of npm makes of a chat, streamed and with a tool.
import { openAi } from "./majors.mjs";

const [major, edge, chat, tool] = process.argv.slice(2);
const OpenAI = await openAi(major);
const asked = JSON.parse(chat);
const client = new OpenAI({ apiKey: "none", baseURL: `${edge}/v1`, maxRetries: 0 });

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}

let events = "";
const helper = client.chat.completions.stream(asked);
helper.on("content", (delta) => (events += delta));
await helper.done();

const required = { ...asked, max_tokens: 100, tools: [JSON.parse(tool)] };
const calling = client.chat.completions.stream({
  ...required,
  tool_choice: "required",
  parallel_tool_calls: false,
});
const called = await calling.finalChatCompletion();

const models = [];
for await (const model of client.models.list()) models.push(model.id);

let error = null;
try {
  await client.chat.completions.create({ ...asked, model: "other" });
} catch (caught) {
  error = [caught.status, caught.code];
}

const { function: call } = called.choices[0].message.tool_calls[0];
console.log(JSON.stringify({ text, events, usage, call, models, error }));
