// The packages of npm by their major version: the newest one, or the one before. That of `ai` and `openai` is
// the same. Packages of theirs with other numbers are those of the same time.

/** The AI SDK and its providers. */
export async function aiSdk(major) {
  const names = {
    7: ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"],
    6: ["ai-6", "@ai-sdk/openai-3", "@ai-sdk/openai-compatible-2"],
  }[major];
  const modules = await Promise.all(names.map((name) => import(name)));
  return Object.assign({}, ...modules);
}

/** The chat that `useChat` holds in React. */
export async function reactChat(major) {
  return (await import({ 7: "@ai-sdk/react", 6: "@ai-sdk/react-3" }[major])).Chat;
}

/** The EventSource of npm. */
export async function eventSource(major) {
  return (await import({ 7: "eventsource", 6: "eventsource-4" }[major])).EventSource;
}

/** The class of the client of OpenAI. */
export async function openAi(major) {
  return (await import({ 7: "openai", 6: "openai-6" }[major])).default;
}

/** The class of the client of Anthropic. */
export async function anthropic(major) {
  return (await import({ 1: "@anthropic-ai/sdk", 0: "@anthropic-ai/sdk-0" }[major])).default;
}

/** The helpers of the client of Anthropic. */
export async function anthropicHelpers(major) {
  const name = { 1: "@anthropic-ai/sdk", 0: "@anthropic-ai/sdk-0" }[major];
  const paths = ["helpers/json-schema", "helpers/beta/json-schema"];
  return Object.assign({}, ...(await Promise.all(paths.map((path) => import(`${name}/${path}`)))));
}
