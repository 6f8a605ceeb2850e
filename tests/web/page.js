// The faults, in a page: what came of them goes back to the site.

import { run } from "./faults.js";

const control = async (command) => {
  const answer = await fetch(`/control/${command}`, { method: "POST" });
  if (!answer.ok) throw new Error(await answer.text());
};

async function told() {
  try {
    return await run({ ...(await (await fetch("/world")).json()), control });
  } catch (error) {
    return { ran: 0, failed: { "the suite itself": `${error.stack ?? error}` } };
  }
}

await fetch("/result", { method: "POST", body: JSON.stringify(await told()) });
