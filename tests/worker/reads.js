// The browser's client where Workers run: `workerd test` calls `test`, which reads from an edge.

import assert from "node:assert/strict";

import { stream } from "../../edge/web/tailrace/index.js";

export default {
  async test(_control, { EDGE, INPUT, WHOLE }) {
    const url = `${EDGE}/v1/generate`;
    for (const transport of ["fetch", "websocket"]) {
      const reading = stream(url, { input: JSON.parse(INPUT), transport });
      assert.equal(await reading.text(), WHOLE);
      assert.equal(reading.transport, transport);
      const { id, token } = reading;
      const rest = stream(`${url}/${id}`, { token, transport, after: 4 });
      assert.ok(WHOLE.endsWith(await rest.text()));
      assert.notEqual(rest.content, "");
      assert.equal(rest.nextIndex, reading.nextIndex);
      assert.equal((await reading.cancel()).state, "ended");
    }
    console.log(`read in ${navigator.userAgent}`);
  },
};
