// What a thousand streams, one after the other, leave in the heap of Node.js:
// node --expose-gc --experimental-websocket leak_in_node.mjs SITE

import { oneAfterTheOther, prepared } from "./faults.js";

const site = process.argv[2];
const world = await prepared(await (await fetch(`${site}/world`)).json());

/** What is used when all that can be is collected. */
async function used() {
  for (let nth = 0; nth < 5; nth++) {
    await new Promise((resolve) => setTimeout(resolve, 20)); // finalizers run between tasks
    globalThis.gc();
  }
  return process.memoryUsage().heapUsed;
}

const grown = {};
for (const transport of ["fetch", "websocket"]) {
  await oneAfterTheOther(world, 400, transport);
  const before = await used();
  await oneAfterTheOther(world, 1000, transport);
  grown[transport] = (await used()) - before;
}
console.log(JSON.stringify(grown));
process.exit(0);
