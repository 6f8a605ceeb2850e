// A page that is closed while its chat is answered, and opened again at another edge.
// node waiting.mjs MAJOR EDGE OTHER_EDGE

import { chatOf } from "./chat.mjs";
import { aiSdk } from "./majors.mjs";

const [major, edge, other] = process.argv.slice(2);
const Chat = chatOf(await aiSdk(major));
const id = `chat-waiting-${major}`;
const asked = { id: "u1", role: "user", parts: [{ type: "text", text: "Count, and wait." }] };

const begun = await fetch(`${edge}/api/chat`, {
  method: "POST",
  body: JSON.stringify({ id, messages: [asked], trigger: "submit-message" }),
});
const stream = begun.headers.get("tailrace-stream");
const reader = begun.body.getReader();
await reader.read();
await reader.cancel();

// It is shown all that there is; then somebody cancels the answer.
const chat = new Chat({ url: other, id, messages: [asked] });
const resumed = chat.resumeStream();
const text = () =>
  chat.messages
    .at(-1)
    .parts.map((part) => part.text ?? "")
    .join("");
while (!text().endsWith("39, ")) await new Promise((turn) => setImmediate(turn));
await fetch(`${edge}/v1/generate/${stream}/cancel`, { method: "POST" });
await resumed;

// Who comes back later still is shown the same, and that it was cancelled.
const later = new Chat({ url: other, id, messages: [asked] });
await later.resumeStream();

const statusOf = async (name) => (await fetch(`${other}/api/chat/${name}/stream`)).status;
console.log(
  JSON.stringify({
    header: begun.headers.get("x-vercel-ai-ui-message-stream"),
    roles: chat.messages.map(({ role }) => role),
    text: text(),
    status: chat.status,
    unknown: await statusOf("chat-nobody-has"),
    later: later.messages.map(({ parts }) => parts.map((part) => part.text ?? "").join("")),
    badName: await statusOf("x".repeat(129)),
  }),
);
