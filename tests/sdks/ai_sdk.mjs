// The AI SDK against a real edge: its chat with the way back, its providers, and an EventSource.
// node ai_sdk.mjs MAJOR EDGE OTHER_EDGE

import { chatOf } from "./chat.mjs";
import { aiSdk, eventSource } from "./majors.mjs";

const [major, edge, other] = process.argv.slice(2);
const sdk = await aiSdk(major);
const { createOpenAI, createOpenAICompatible, generateText, jsonSchema, stepCountIs, streamText, tool } = sdk;
const Chat = chatOf(sdk);
const ID = `chat-${major}`;
const FIXED = { seed: 7, ignore_eos: true, temperature: 0.8, max_tokens: 60 };

const textOf = (message) =>
  message.parts
    .filter(({ type }) => type === "text")
    .map(({ text }) => text)
    .join("");

// A message that is read without a break, then its answer once more.
async function conversation() {
  const ends = [];
  const chat = new Chat({ url: edge, body: FIXED, id: ID, onFinish: (end) => ends.push(end) });
  await chat.sendMessage({ text: "Once upon a time" });
  await chat.sendMessage({ text: "And then?" });
  await chat.regenerate();
  const { messages, status, error } = chat;
  return {
    status,
    error: error?.message,
    roles: messages.map(({ role }) => role),
    texts: messages.map(textOf),
    reasons: ends.map(({ finishReason }) => finishReason),
    again: await again(messages),
    unknown: (await fetch(`${other}/api/chat/chat-nobody-has/stream`)).status,
  };
}

// A page that was away when the answer ended, with what it may have kept of the conversation.
async function again(messages) {
  const before = messages.slice(0, -1);
  const partial = structuredClone(messages.at(-1));
  const part = partial.parts.find(({ type }) => type === "text");
  Object.assign(part, { text: part.text.slice(0, 20), state: "streaming" });
  const told = {};
  for (const [name, kept] of Object.entries({
    none: before,
    part: [...before, partial],
    whole: structuredClone(messages),
  })) {
    const chat = new Chat({ url: other, id: ID, messages: kept });
    await chat.resumeStream();
    const { status, error } = chat;
    told[name] = { status, error: error?.message, texts: chat.messages.map(textOf) };
  }
  return told;
}

async function refused() {
  const chat = new Chat({ url: edge, body: FIXED, id: "chat-refused" });
  await chat.sendMessage({ text: "x", files: [{ type: "file", mediaType: "image/png", url: "data:," }] });
  return { status: chat.status, error: chat.error?.message };
}

async function provided() {
  const options = { temperature: 0, maxOutputTokens: 60, prompt: "Once upon a time" };
  const openai = createOpenAI({ baseURL: `${edge}/v1`, apiKey: "unused" });
  const compatible = createOpenAICompatible({
    name: "tailrace",
    baseURL: `${edge}/v1`,
    includeUsage: true,
  });
  const told = {};
  for (const [name, model] of [
    ["responses", openai.responses("demo")],
    ["compatible", compatible.chatModel("demo")],
  ]) {
    const streamed = streamText({ model, ...options });
    const parts = [];
    for await (const part of streamed.textStream) parts.push(part);
    const whole = await generateText({ model, ...options });
    told[name] = {
      streamed: parts.join(""),
      pieces: parts.length,
      whole: whole.text,
      reason: await streamed.finishReason,
      usage: (await streamed.usage).outputTokens,
    };
  }
  return told;
}

// A tool is called because it has to be, and its result is left to the model.
async function tools() {
  const digits = { type: "object", properties: { a: { enum: [1, 2] } }, required: ["a"] };
  const openai = createOpenAI({ baseURL: `${edge}/v1`, apiKey: "unused" });
  const told = {};
  for (const model of [openai.responses("demo"), openai.chat("demo")]) {
    const { steps, text } = await generateText({
      model,
      tools: { double: tool({ inputSchema: jsonSchema(digits), execute: ({ a }) => String(2 * a) }) },
      prompt: "What is 1 + 1?",
      maxOutputTokens: 100,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
    });
    told[model.provider] = { called: steps[0].toolCalls.map(({ toolName }) => toolName), steps: steps.length, text };
  }
  return told;
}

// EventSource reads the native route of the stream that a response is, from any index.
async function readByEventSource() {
  const openai = createOpenAI({ baseURL: `${edge}/v1`, apiKey: "unused" });
  const { response, text } = await generateText({
    model: openai.responses("demo"),
    prompt: "Once upon a time",
  });
  const EventSource = await eventSource(major);
  const source = new EventSource(`${other}/v1/generate/${response.id.replace("resp_", "")}`);
  const pieces = [];
  source.onmessage = ({ data }) => pieces.push(JSON.parse(data).text);
  await new Promise((done) => source.addEventListener("end", done));
  source.close();
  return { text, events: pieces.join("") };
}

console.log(
  JSON.stringify({
    conversation: await conversation(),
    refused: await refused(),
    provided: await provided(),
    tools: await tools(),
    eventSource: await readByEventSource(),
  }),
);
