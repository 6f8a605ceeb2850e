// A network that breaks as it is told: real fetches and real WebSockets, with a hand on each frame.

import { system } from "../../edge/web/tailrace/connection.js";
import { Splitter, decode } from "../../edge/web/tailrace/wire.js";

/**
 * The system of a stream, whose frames go through `alter(raw, frame, connection)`: it gives the
 * frames that arrive in the place of one, or CUT. `connection` counts from 0.
 */
export const CUT = Symbol("cut");

export function breaking(alter, changes = {}) {
  const seen = { connections: 0, frames: 0, wake: null, cut: null, isSilent: false };
  const pass = (splitter, data, connection) => {
    const out = [];
    for (const raw of splitter.feed(data)) {
      const { frame } = decode(raw);
      seen.frames += "index" in frame;
      const altered = alter(raw, frame, connection);
      if (altered === CUT) return [out, true];
      out.push(...altered);
    }
    return [out, false];
  };

  async function brokenFetch(url, init) {
    const response = await fetch(url, init);
    const isOfFrames = response.headers.get("Content-Type")?.startsWith("application/vnd.tailrace.frames");
    if (!response.ok || !response.body || !isOfFrames) return response;
    const connection = seen.connections++;
    const splitter = new Splitter();
    const reader = response.body.getReader();
    let isOver = false;
    const body = new ReadableStream({
      async pull(controller) {
        if (isOver) return controller.error(new TypeError("network error"));
        const { value, done } = await reader.read();
        if (done && seen.isSilent) return new Promise(() => {}); // not even the end comes
        if (done) return controller.close();
        const [frames, isCut] = pass(splitter, value, connection);
        for (const raw of frames) controller.enqueue(raw);
        if (!isCut && !frames.length) return this.pull(controller);
        if (isCut) {
          controller.enqueue(value.slice(0, 3)); // the beginning of a frame that never ends
          isOver = true;
          await reader.cancel();
        }
      },
      cancel: (reason) => reader.cancel(reason),
    }, { highWaterMark: 0 });
    return new Response(body, { headers: response.headers });
  }

  class BrokenSocket extends WebSocket {
    connection = seen.connections++;
    isCut = false;
    set onmessage(act) {
      super.onmessage = act && (({ data }) => {
        if (this.isCut) return;
        const [frames, isCut] = pass(new Splitter(), new Uint8Array(data), this.connection);
        this.isCut = isCut;
        for (const raw of frames) act({ data: raw });
        if (isCut) {
          this.close();
          this.onclose?.({ code: 1006 });
        }
      });
    }
  }

  const made = {
    ...system,
    fetch: brokenFetch,
    WebSocket: BrokenSocket,
    random: () => 0,
    onWake(wake, cut) {
      Object.assign(seen, { wake, cut });
      return system.onWake(wake, cut);
    },
    ...changes,
  };
  return { system: made, seen };
}
