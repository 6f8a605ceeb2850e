// Turns the frames of one stream into the chunks of one message of the AI SDK, as an edge does at
// /api/chat.

/** @typedef {import("./core.js").StreamFrame} StreamFrame */
/** @typedef {import("./schema.js").ToolCall} ToolCall */
/** @typedef {{type: "text-start" | "text-end" | "reasoning-start" | "reasoning-end", id: string}} PartChunk
 */
/** @typedef {{type: "text-delta" | "reasoning-delta", id: string, delta: string}} DeltaChunk */
/** @typedef {{type: "data-revised", id: string, data: {text: string, final: boolean, stability: number}}} RevisedChunk
 */
/** @typedef {{toolCallId: string, toolName: string}} CallOfTool */
/** @typedef {{type: "tool-input-delta", toolCallId: string, inputTextDelta: string}} InputDelta */
/** @typedef {CallOfTool & {type: "tool-input-start"}} InputStart */
/** @typedef {CallOfTool & {type: "tool-input-available", input: unknown}} InputAvailable */
/** @typedef {CallOfTool & {type: "tool-input-error", input: unknown, errorText: string}} InputError
 */
/** @typedef {InputStart | InputDelta | InputAvailable | InputError} ToolChunk */
/** @typedef {"stop" | "length" | "content-filter" | "tool-calls"} FinishReason */
/** @typedef {{type: "start", messageId: string} | {type: "start-step" | "finish-step"}} StepChunk
 */
/** @typedef {{type: "finish", finishReason: FinishReason} | {type: "abort", reason: string}} FinishChunk
 */
/** @typedef {FinishChunk | {type: "error", errorText: string}} EndChunk */

/** The UIMessageChunks of `ai` that a stream can have.
 * @typedef {StepChunk | PartChunk | DeltaChunk | RevisedChunk | ToolChunk | EndChunk} UiChunk
 */

/** The finish reasons for which the AI SDK has a word. @type {Record<string, FinishReason>} */
const FINISH_REASONS = {
  stop: "stop",
  length: "length",
  filtered: "content-filter",
  "tool-calls": "tool-calls",
};

/** Makes the chunks of one message. It gets the frames of a stream in order, from the first one on.
 */
export class UiChunks {
  #message;
  #parts = 0;
  /** The open part. @type {{kind: "text" | "reasoning", id: string} | null} */
  #open = null;
  /** @type {Map<number, {id: string, name: string, pieces: string[]}>} */
  #calls = new Map();
  #text = "";
  /** The shown text, while the stream's text does not begin with it. @type {string | null} */
  #shown = null;
  /** The whole text that was given last. */
  #revised = "";

  /** @param {string} stream its id */
  constructor(stream) {
    this.#message = `msg_${stream}`;
  }

  /** Return the chunks that come before those of all frames. @returns {UiChunk[]} */
  begin() {
    return [{ type: "start", messageId: this.#message }, { type: "start-step" }];
  }

  /** Return the chunks of the next frame.
   * @param {StreamFrame} frame
   * @param {string} text of the stream, with this frame
   * @returns {UiChunk[]}
   */
  add(frame, text) {
    switch (frame.type) {
      case "Snapshot": // the text of several frames
        return this.add({ ...frame, type: frame.reasoning ? "Reasoning" : "Token" }, text);
      case "Token":
      case "ScoredToken":
      case "Revision":
        return this.#textChunks(frame, text);
      case "Reasoning": {
        const { id, begun } = this.#part("reasoning");
        return [...begun, { type: "reasoning-delta", id, delta: frame.text }];
      }
      case "ToolCall":
        return this.#callChunks(frame);
      case "StreamEnd":
        return [...this.#close(), ...endChunks(frame)];
      default:
        return [];
    }
  }

  /** @param {import("./schema.js").Token | import("./schema.js").ScoredToken | import("./schema.js").Revision} frame
   * @param {string} text
   * @returns {UiChunk[]}
   */
  #textChunks(frame, text) {
    const { id, begun } = this.#part("text");
    const shown = this.#shown ?? this.#text;
    this.#text = text;
    if (frame.type !== "Revision" && this.#shown === null) {
      return frame.text ? [...begun, { type: "text-delta", id, delta: frame.text }] : begun;
    }
    if (text.startsWith(shown)) {
      this.#shown = null;
      const delta = text.slice(shown.length);
      if (delta) begun.push({ type: "text-delta", id, delta });
      return begun;
    }
    // The message cannot take back shown text, so a part besides it has the whole text.
    this.#shown = shown;
    if (frame.type === "Revision") begun.push(this.#whole(frame.final, frame.stability));
    return begun;
  }

  /** Return the chunk with the whole text. @param {boolean} final false if a revision may change it
   * @param {number} stability how likely no revision changes it
   * @returns {UiChunk}
   */
  #whole(final, stability) {
    const text = (this.#revised = this.#text);
    return { type: "data-revised", id: this.#message, data: { text, final, stability } };
  }

  /** Open a part of this kind, unless it is open. @param {"text" | "reasoning"} kind
   * @returns {{id: string, begun: UiChunk[]}}
   */
  #part(kind) {
    if (this.#open?.kind === kind) return { id: this.#open.id, begun: [] };
    const begun = this.#close();
    const id = String(this.#parts++);
    this.#open = { kind, id };
    begun.push({ type: `${kind}-start`, id });
    return { id, begun };
  }

  /** @param {ToolCall} frame @returns {UiChunk[]} */
  #callChunks(frame) {
    /** @type {UiChunk[]} */
    const chunks = [];
    let call = this.#calls.get(frame.call);
    if (!call) {
      if (!this.#calls.size) chunks.push(...this.#close());
      call = { id: frame.id, name: frame.name, pieces: [] };
      this.#calls.set(frame.call, call);
      chunks.push({ type: "tool-input-start", toolCallId: call.id, toolName: call.name });
    }
    if (frame.arguments) {
      call.pieces.push(frame.arguments);
      chunks.push({ type: "tool-input-delta", toolCallId: call.id, inputTextDelta: frame.arguments });
    }
    return chunks;
  }

  /** End all open parts. @returns {UiChunk[]} */
  #close() {
    /** @type {UiChunk[]} */
    const chunks = [];
    // Text after the last revision was not sent as deltas, which would not fit what is shown.
    if (this.#open && this.#shown !== null && this.#revised !== this.#text) chunks.push(this.#whole(true, 1));
    if (this.#open) chunks.push({ type: `${this.#open.kind}-end`, id: this.#open.id });
    this.#open = null;
    for (const { id, name, pieces } of this.#calls.values()) chunks.push(inputChunk(id, name, pieces.join("")));
    this.#calls.clear();
    return chunks;
  }
}

/** @param {string} toolCallId @param {string} toolName @param {string} text @returns {UiChunk} */
function inputChunk(toolCallId, toolName, text) {
  try {
    return { type: "tool-input-available", toolCallId, toolName, input: JSON.parse(text || "{}") };
  } catch {
    const errorText = "the arguments are no JSON";
    return { type: "tool-input-error", toolCallId, toolName, input: text, errorText };
  }
}

/** @param {import("./schema.js").StreamEnd} end @returns {UiChunk[]} */
function endChunks({ finish_reason, message }) {
  if (finish_reason === "cancelled") {
    return [{ type: "finish-step" }, { type: "abort", reason: "cancelled" }];
  }
  const finishReason = FINISH_REASONS[finish_reason];
  if (!finishReason) return [{ type: "error", errorText: message ?? "the generation failed" }];
  return [{ type: "finish-step" }, { type: "finish", finishReason }];
}
