// The AI SDK with tools: its chat, whose page runs them, and its providers, whose server does.
// node tools.mjs MAJOR EDGE

import { chatOf } from "./chat.mjs";
import { aiSdk } from "./majors.mjs";

const [major, edge] = process.argv.slice(2);
const sdk = await aiSdk(major);
const { createOpenAI, createOpenAICompatible, generateText, jsonSchema, stepCountIs, tool } = sdk;
const Chat = chatOf(sdk);
const numbers = { type: "object", properties: { numbers: { type: "array", items: { type: "number" } } } };
const run = {
  add: ({ numbers }) => String(numbers.reduce((one, other) => one + other, 0)),
  now: () => "noon",
};

async function chat() {
  let finished;
  const whole = new Promise((done) => (finished = done));
  const functions = [
    { type: "function", function: { name: "add", parameters: numbers } },
    { type: "function", function: { name: "now" } },
  ];
  const made = new Chat({
    url: edge,
    id: `chat-tools-${major}`,
    body: { tools: functions },
    sendAutomaticallyWhen: sdk.lastAssistantMessageIsCompleteWithToolCalls,
    onToolCall: ({ toolCall: { toolName, toolCallId, input } }) => {
      made.addToolOutput({ tool: toolName, toolCallId, output: run[toolName](input) });
    },
    onFinish: ({ finishReason }) => finishReason === "stop" && finished(),
    onError: finished,
  });
  await made.sendMessage({ text: "What is 12 + 30?" });
  await whole;
  const { parts } = made.messages.at(-1);
  return {
    status: made.status,
    error: made.error?.message,
    parts: parts.map(({ type }) => type),
    text: parts.map(({ type, text }) => (type === "text" ? text : "")).join(""),
  };
}

async function provided(model) {
  const tools = {
    add: tool({ inputSchema: jsonSchema(numbers), execute: run.add }),
    now: tool({ inputSchema: jsonSchema({ type: "object", properties: {} }), execute: run.now }),
  };
  const { steps, text } = await generateText({
    model,
    tools,
    prompt: "What is 12 + 30?",
    stopWhen: stepCountIs(3),
  });
  return { steps: steps.length, text, called: steps[0].toolCalls.map(({ toolName }) => toolName) };
}

const openai = createOpenAI({ baseURL: `${edge}/v1`, apiKey: "unused" });
const compatible = createOpenAICompatible({ name: "tailrace", baseURL: `${edge}/v1` });
console.log(
  JSON.stringify({
    chat: await chat(),
    responses: await provided(openai.responses("adder")),
    compatible: await provided(compatible.chatModel("adder")),
  }),
);
