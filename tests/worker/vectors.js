// The codec's own tests (tests/web/wire.test.js) as a Worker: `workerd test` calls `test`.
// The bundle has `node:test` and `node:fs` from here.

import frames from "../vectors/frames.json";
import invalid from "../vectors/invalid.json";
import primitives from "../vectors/primitives.json";
import streams from "../vectors/streams.json";

const FILES = { frames, invalid, primitives, streams };
const tests = [];

/** As `node:test` has it. */
export function test(name, run) {
  tests.push([name, run]);
}

/** As `node:fs` has it. */
export function readFileSync(url) {
  const name = url.pathname.split("/").at(-1).replace(".json", "");
  return FILES[name];
}

export default {
  async test() {
    await import("../web/wire.test.js");
    for (const [name, run] of tests) {
      try {
        run();
      } catch (error) {
        throw new Error(`${name}: ${error.message}`);
      }
    }
    console.log(`passed ${tests.length} in ${navigator.userAgent}`);
  },
};
