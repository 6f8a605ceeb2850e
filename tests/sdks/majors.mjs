// The packages of npm by the major version of `ai` and `openai`, which is the same for both: the newest
// one, or the one before. Packages with other numbers are those of the same time.

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
