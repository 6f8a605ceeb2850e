// node ui_chunks.mjs STREAMS: the chunks that each stream of a JSON file makes, from its frames in hexadecimal.

import { readFileSync } from "node:fs";
import { Transcript } from "../../edge/web/tailrace/transcript.js";
import { UiChunks } from "../../edge/web/tailrace/ui_chunks.js";
import { decode, fromHex } from "../../edge/web/tailrace/wire.js";

const streams = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const made = streams.map(({ id, frames }) => {
  const chunks = new UiChunks(id);
  const transcript = new Transcript();
  const told = chunks.begin();
  for (const raw of frames) {
    const { frame } = decode(fromHex(raw));
    transcript.add(frame);
    told.push(...chunks.add(frame, transcript.text));
  }
  return told;
});
console.log(JSON.stringify(made));
