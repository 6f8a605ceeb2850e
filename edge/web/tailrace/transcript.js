// The text of a stream, as its revisions left it.

/** @typedef {import("./schema.js").Logged} Logged */

export class Transcript {
  text = "";
  /** Where the text of each frame begins. @type {number[]} */
  #starts = [];
  /** @type {number | null} */
  #first = null;

  /** Take in the next frame. @param {Logged} frame */
  add(frame) {
    this.#first ??= frame.index;
    if (frame.type === "Revision") {
      // What lies before the first frame that was read cannot be replaced here.
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
