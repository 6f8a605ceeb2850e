// The text of a stream with its revisions applied.

/** @typedef {import("./schema.js").Logged} Logged */

export class Transcript {
  text = "";
  /** The offset at which the text of each frame begins. @type {number[]} */
  #starts = [];
  /** @type {number | null} */
  #first = null;

  /** Add the next frame. @param {Logged} frame */
  add(frame) {
    this.#first ??= frame.index;
    if (frame.type === "Revision") {
      // Text before the first frame that was read is not here, so it cannot be replaced.
      const from = Math.max(0, frame.replaces - this.#first);
      const start = this.#starts[from] ?? this.text.length;
      this.text = this.text.slice(0, start);
      this.#starts.fill(start, from);
    }
    this.#starts.push(this.text.length);
    if (frame.type === "Token" || frame.type === "ScoredToken" || frame.type === "Revision") {
      this.text += frame.text;
    }
  }
}
