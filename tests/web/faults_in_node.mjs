// The faults, in Node.js: node --experimental-websocket faults_in_node.mjs SITE

import { run } from "./faults.js";

const site = process.argv[2];
const control = async (command) => {
  const answer = await fetch(`${site}/control/${command}`, { method: "POST" });
  if (!answer.ok) throw new Error(await answer.text());
};
const world = await (await fetch(`${site}/world`)).json();
console.log(JSON.stringify(await run({ ...world, control })));
process.exit(0);
