// The text of a stream with its revisions applied.

/** @typedef {import("./core.js").StreamFrame} StreamFrame */

export class Transcript {
  text = "";
  /** The offset at which the text of each frame begins, by index. @type {number[]} */
  #starts = [];

  /** Add the next frame. @param {StreamFrame} frame */
  add(frame) {
    const starts = this.#starts;
    starts[frame.index] = this.text.length;
    if (frame.type === "Revision") {
      // Text before the first frame that was read is not here, so it cannot be replaced.
      const start = starts[frame.replaces] ?? 0;
      this.text = this.text.slice(0, start);
      starts.fill(start, frame.replaces);
    }
    /** @type {any} */
    const { text, reasoning = frame.type === "Reasoning" } = frame;
    if (!reasoning) this.text += text ?? "";
  }
}
