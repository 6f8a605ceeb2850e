// Reads a new stream over a WebSocket, as a page does, and prints the index of each frame; then
// what it read: node --experimental-websocket reads_by_websocket.mjs EDGE INPUT

import { stream } from "../../edge/web/tailrace/index.js";

const [edge, input] = process.argv.slice(2);
const reading = stream(`${edge}/v1/generate`, {
  input: JSON.parse(input),
  transport: "websocket",
  backoff: { leastMs: 20, mostMs: 200, patienceMs: 60_000 },
});
const indexes = [];
for await (const frame of reading) {
  indexes.push(frame.index);
  console.log(frame.index);
}
const { content, resumes, transport } = reading;
console.log(JSON.stringify({ content, indexes, resumes, transport }));
process.exit(0);
