// The conversation of the first page: its messages, and what happened on the network meanwhile.
//
// It survives a change to another page of the console, and a reload. The client stores its position
// in the stream in sessionStorage, and this file stores the earlier messages there.

import { branch } from "../tailrace/branch.js";
import { resume, stream } from "../tailrace/index.js";
import { GRANULARITIES, Pace } from "../tailrace/pace.js";
import { Transcript } from "../tailrace/transcript.js";
import { encode } from "../tailrace/wire.js";
import { credentials, key } from "./api.js";
import { CuttableNetwork } from "./cuttable_network.js";

const URL_OF_STREAMS = "/v1/generate";
const TURNS = "tailrace.turns";
/** The reader's settings of pace and format, in the storage of all tabs. */
const HAND = "tailrace.hand";
const MAX_TURNS = 40;
/** Number of tokens after which the network is cut if the button was pressed before the answer
 * began, and the time for which it stays cut.
 */
export const CUT_AFTER = 60;
export const CUT_MS = 1500;
/** Maximum number of points in the drawing. If there are more, every other point is dropped. */
const MOST_POINTS = 600;

const utf8 = new TextEncoder();

/** Return the bytes of a token as a frame, as a server-sent event and as a chunk of OpenAI’s API. */
export function costs(frame, model, id) {
  const own = encode(frame).length;
  const { text, index } = frame;
  const event = `id: ${index}\ndata: ${JSON.stringify({ text, index })}\n\n`;
  const chunk = {
    id: `chatcmpl-${id}`,
    object: "chat.completion.chunk",
    created: Math.floor(Date.now() / 1000),
    model,
    choices: [{ index: 0, delta: { content: text }, finish_reason: null }],
  };
  return [own, utf8.encode(event).length, utf8.encode(`data: ${JSON.stringify(chunk)}\n\n`).length];
}

/** Return empty measurements of a stream. Times are in ms since its request. */
function fresh() {
  return {
    beganAt: performance.now(),
    id: null,
    state: "connecting",
    quiet: false,
    ways: [],
    first: null,
    took: null,
    tokens: 0,
    frames: 0,
    resumes: 0,
    bytes: [0, 0, 0],
    points: [],
    cuts: [],
    events: [],
    end: null,
  };
}

/** Speeds in words a minute that can be chosen; 0 means: as the text arrives. */
export const SPEEDS = [0, 120, 180, 240, 350, 500];
export const FORMATS = ["auto", "markdown", "plain"];

/** Return the settings that were stored, with defaults for what cannot be used. */
function storedHand() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(HAND) || "{}") ?? {};
  } catch {
    // Not ours, or forbidden.
  }
  const one = (values, value) => (values.includes(value) ? value : values[0]);
  return {
    speed: one(SPEEDS, stored.speed),
    granularity: one(GRANULARITIES, stored.granularity),
    format: one(FORMATS, stored.format),
  };
}

const speedOf = ({ speed }) => speed || Infinity;

class Conversation extends EventTarget {
  turns = JSON.parse(sessionStorage.getItem(TURNS) || "[]");
  hand = storedHand();
  pace = new Pace({ wordsPerMinute: speedOf(this.hand), granularity: this.hand.granularity });
  wire = null;
  error = null;
  armed = false;
  #network = new CuttableNetwork();
  #stream = null;
  /** The end of reading the answer that is read now. @type {Promise<void>} */
  #followed = Promise.resolve();
  /** The length of the last answer's text after each of its frames. A length that a revision has
   * taken back is NaN. @type {number[]}
   */
  #lengths = [];
  #drawn = 0;

  constructor() {
    super();
    this.pace.watch(() => this.#changed());
    // A performance entry appears only when a request has ended. So use that of the last ended
    // request: the running one has the same protocol.
    const seen = (list) => {
      for (const entry of list.getEntries()) {
        const isOurs = entry.name.includes(URL_OF_STREAMS) || entry.name.endsWith("/readyz");
        if (isOurs && entry.nextHopProtocol) this.protocol = entry.nextHopProtocol;
      }
      this.#changed();
    };
    new PerformanceObserver((list) => seen(list)).observe({ type: "resource", buffered: true });
    const last = this.turns.at(-1);
    if (last?.role === "assistant" && last.open) this.#pickUp();
  }

  get busy() {
    return this.#stream !== null;
  }

  get isCut() {
    return this.#network.isCut;
  }

  /** Return the body of the request that `send` would make. */
  input(text, { model, mode, maxTokens }) {
    const common = { model, max_tokens: maxTokens };
    if (mode !== "chat") return { ...common, prompt: text, ignore_eos: true };
    const said = this.turns.filter((turn) => turn.mode === "chat").map(({ role, text }) => ({ role, content: text }));
    return { ...common, messages: [...said, { role: "user", content: text }] };
  }

  send(text, { model, mode, maxTokens, transport }) {
    if (this.busy) return;
    const input = this.input(text, { model, mode, maxTokens });
    this.turns.push({ role: "user", text, mode });
    this.turns.push({ role: "assistant", text: "", mode, model, open: true });
    this.#read((options) => stream(URL_OF_STREAMS, { ...options, input }), model, transport);
  }

  get canRegenerate() {
    const last = this.turns.at(-1);
    return !this.busy && last?.role === "assistant" && Boolean(last.id);
  }

  /** Replace the last answer by another one to the same request. */
  again() {
    if (!this.canRegenerate) return;
    this.#branch({ index: this.turns.at(-1).from ?? 0 }, "sent: another answer");
  }

  // ---- the reader's controls ----

  /** Change some of the settings `speed`, `granularity` and `format`. */
  set(change) {
    this.hand = { ...this.hand, ...change };
    this.pace.wordsPerMinute = speedOf(this.hand);
    this.pace.granularity = this.hand.granularity;
    try {
      localStorage.setItem(HAND, JSON.stringify(this.hand));
    } catch {
      // The storage is full or forbidden: the settings last until a reload.
    }
    this.#changed();
  }

  togglePause() {
    if (this.pace.isPaused) this.pace.resume();
    else this.pace.pause();
    if (this.busy) this.#tell(this.pace.isPaused ? "paused by you: no more frames are taken" : "reading goes on");
  }

  /** The text of a message that is shown now. */
  shown(turn) {
    return turn.open && turn === this.turns.at(-1) ? this.pace.visible : turn.text;
  }

  /** Return true if a message is shown as Markdown. */
  isMarkdown({ mode }) {
    return this.hand.format === "markdown" || (this.hand.format === "auto" && mode === "chat");
  }

  /** Insert a text into the answer, which continues from there. Throws the refusal. */
  async steer(text) {
    if (!this.busy) return;
    await this.#stream.steer(text);
    this.#tell("steered by you");
  }

  /** The number of frames of the last answer that are shown as a whole, or null if it has no branch. */
  get branchIndex() {
    const last = this.turns.at(-1);
    if (last?.role !== "assistant" || !last.id || !this.#lengths.length) return null;
    const { length } = this.shown(last);
    let index = this.#lengths.length;
    while (index > 0 && !(this.#lengths[index - 1] <= length)) index -= 1;
    return index;
  }

  /** True if the last answer is part of a chat, so that an instruction can follow what is shown of it. */
  get canInstruct() {
    return this.branchIndex !== null && this.turns.at(-1).mode === "chat";
  }

  /** Begin another answer that shares what is shown of the last one. The rest of that is not generated.
   * `text` follows what is shared as if the model had written it, `instruction` as the next message.
   * @param {{text?: string, instruction?: string}} added at most one of the two, not empty
   */
  async branch(added) {
    const index = this.branchIndex;
    if (index === null) return;
    const shared = this.turns.at(-1).text.slice(0, this.#lengths[index - 1] ?? 0);
    const left = this.#stream;
    if (left) {
      left.detach();
      this.pace.release();
      await this.#followed;
    }
    this.#branch({ index, ...added }, `branched after ${index} frames`, shared);
    // Cancel the old answer only when the branch has begun: if the branch is refused, it is still needed.
    const forget = this.#stream?.watch(() => {
      if (this.#stream?.state !== "open") return;
      forget();
      if (left && !left.end) left.cancel().catch(() => {});
    });
  }

  /** Read a branch of the last answer in its place. With an instruction, `shared` stays of that answer,
   * and the branch is the answer to the next message.
   * @param {import("../tailrace/branch.js").BranchInput} input
   * @param {string} note
   * @param {string} [shared]
   */
  #branch(input, note, shared = "") {
    const { length } = this.turns;
    const last = this.turns.at(-1);
    const { id, token, mode, model } = last;
    const before = { ...last, open: false };
    if (input.instruction === undefined) Object.assign(last, { text: "", cuts: [], open: true });
    else {
      Object.assign(last, { text: shared, open: false });
      this.turns.push({ role: "user", text: input.instruction, mode });
      this.turns.push({ role: "assistant", text: "", mode, model, open: true, from: input.index });
    }
    const undo = () => {
      this.turns.length = length;
      Object.assign(last, before);
    };
    this.#read((options) => stream(URL_OF_STREAMS, branch(URL_OF_STREAMS, { id, token }, input, options)), model, "auto", note, undo);
  }

  /** End the generation for all readers, and show what there is. */
  async stop() {
    const stopping = this.#stream;
    if (!stopping) return;
    this.#tell("stopped by you");
    this.pace.release();
    try {
      await stopping.cancel();
    } catch (error) {
      this.#fail(error);
    }
  }

  /** Cut the network now, or CUT_AFTER tokens into the next answer if no answer is running. */
  cut() {
    if (!this.busy) this.armed = !this.armed;
    else if (!this.isCut) this.#cut();
    this.#changed();
  }

  clear() {
    if (this.busy) return;
    this.turns = [];
    this.wire = null;
    this.error = null;
    this.#save();
    this.#changed();
  }

  reconnect() {
    this.error = null;
    this.#stream?.reconnect();
    this.#changed();
  }

  /** Read the answer again after a reload, from its beginning, because the page has lost it. */
  #pickUp() {
    const last = this.turns.at(-1);
    last.text = "";
    last.cuts = [];
    this.#read((options) => resume(URL_OF_STREAMS, options), last.model, "auto", "picked up after a reload");
  }

  /** Read an answer. If it is refused, `undo` restores the messages as they were. */
  #read(open, model, transport, note, undo) {
    this.#save();
    this.error = null;
    this.#lengths = [];
    this.pace.resume();
    this.pace.begin();
    const wire = (this.wire = fresh());
    wire.armed = this.armed;
    this.armed = false;
    const options = {
      storage: sessionStorage,
      system: this.#network.system,
      transport,
      apiKey: key.get() || undefined,
      onState: (state, one) => this.#stateIs(state, one),
    };
    const made = open(options);
    if (!made) {
      this.turns.at(-1).open = false;
      this.#save();
      return;
    }
    this.#stream = made;
    this.#tell(note || "sent");
    this.#followed = this.#follow(made, wire, model, undo);
  }

  async #follow(made, wire, model, undo) {
    const transcript = new Transcript();
    const turn = this.turns.at(-1);
    try {
      for (;;) {
        try {
          for await (const frame of made) {
            this.#take(frame, made, wire, model, transcript, turn);
            await this.pace.room(made); // meanwhile the client gives no more credit
          }
          break;
        } catch (error) {
          this.#fail(error);
          if (!error.retryable) {
            if (undo && !wire.frames) undo();
            this.pace.release();
            break;
          }
          await this.#again(made); // the “Try again” of the page
        }
      }
      this.pace.end();
      while (!this.pace.isDone) await this.pace.change();
    } finally {
      made.forget();
      turn.open = false;
      this.#stream = null;
      wire.took ??= performance.now() - wire.beganAt;
      this.#save();
      this.#changed();
    }
  }

  #again(made) {
    return /** @type {Promise<void>} */ (new Promise((resolve) => {
      const look = () => {
        if (made.state === "failed") return;
        this.removeEventListener("change", look);
        resolve();
      };
      this.addEventListener("change", look);
    }));
  }

  #take(frame, made, wire, model, transcript, turn) {
    const at = performance.now() - wire.beganAt;
    if (frame.index >= (turn.from ?? 0)) transcript.add(frame); // those before are the text of another message
    wire.id = turn.id = made.id;
    turn.token = made.token;
    wire.frames += 1;
    const cut = wire.cuts.at(-1);
    if (cut && cut.back == null) cut.had = frame.index + 1; // it had arrived before the cut
    if (cut && cut.back != null && cut.firstMissing == null) {
      cut.firstMissing = at - cut.back;
      turn.cuts = [...(turn.cuts ?? []), turn.text.length];
      this.#tell(`resumed: the next token came after ${Math.round(cut.firstMissing)} ms`);
    }
    if (frame.type === "StreamEnd") {
      wire.end = frame;
      wire.took = at;
      this.#tell(`ended: ${frame.finish_reason}`);
    } else if (frame.type === "Token" || frame.type === "ScoredToken") {
      if (wire.tokens === 0) wire.first = at;
      wire.tokens += 1;
      for (const [nth, bytes] of costs(frame, model, made.id).entries()) wire.bytes[nth] += bytes;
      if (wire.armed && wire.tokens >= CUT_AFTER && !wire.cuts.length) this.#cut();
    }
    const missed = cut != null && cut.madeUntil != null && frame.index < cut.madeUntil;
    if (missed) cut.replayed += 1;
    const replayed = missed || frame.index < made.seen; // or shown before a reload
    wire.points.push([at, frame.index, replayed]);
    if (wire.points.length > MOST_POINTS) {
      wire.points = wire.points.filter((_, nth) => nth % 2 === 0 || nth === wire.points.length - 1);
    }
    turn.text = transcript.text;
    if (frame.type === "Revision") this.#lengths.fill(NaN, frame.replaces);
    if (frame.type !== "StreamEnd") this.#lengths[frame.index] = turn.text.length;
    this.pace.feed(turn.text);
    if (frame.index < made.seen) this.pace.catchUp(); // it was shown before a reload
    this.#changed();
  }

  #cut() {
    const { wire } = this;
    const cut = { at: performance.now() - wire.beganAt, had: this.#stream.nextIndex, back: null, madeUntil: null, replayed: 0, firstMissing: null };
    wire.cuts.push(cut);
    this.#network.cut();
    this.#tell("the network is cut");
    setTimeout(() => this.#mend(cut), CUT_MS);
  }

  async #mend(cut) {
    const { id, token } = this.#stream ?? {};
    // Ask how many frames the origin has made meanwhile. This fetch does not use the client’s
    // network, which is still cut.
    const allowed = token ? { "Tailrace-Token": token } : {};
    const headers = { Accept: "application/json", ...allowed, ...credentials() };
    const told = id ? await fetch(`${URL_OF_STREAMS}/${id}`, { headers }).then((answer) => answer.json(), () => null) : null;
    cut.madeUntil = told?.next_index ?? null;
    cut.back = performance.now() - this.wire.beganAt;
    this.#tell("the network is back");
    this.#network.mend();
    this.#changed();
  }

  #stateIs(state, made) {
    const { wire } = this;
    wire.quiet = made.quiet;
    if (wire.state === state) return this.#changed(); // only `quiet` has changed
    wire.state = state;
    if (made.transport && wire.ways.at(-1) !== made.transport) wire.ways.push(made.transport);
    wire.resumes = made.resumes;
    if (state === "suspended") this.#tell("not read for a while: the connection is closed");
    if (state === "waiting") this.#tell("lost; will try again");
    if (state === "open") this.#tell(made.resumes ? `resumed after frame ${made.nextIndex - 1}` : "open");
    this.#changed();
  }

  #tell(what) {
    const { wire } = this;
    wire.events.push({ at: performance.now() - wire.beganAt, what });
    this.#changed();
  }

  #fail(error) {
    this.error = error;
    this.#tell(error.message);
  }

  #save() {
    const kept = this.turns.slice(-MAX_TURNS);
    sessionStorage.setItem(TURNS, JSON.stringify(kept));
  }

  /** Update the page at most once per animation frame, however many tokens arrive. */
  #changed() {
    if (this.#drawn) return;
    this.#drawn = requestAnimationFrame(() => {
      this.#drawn = 0;
      this.dispatchEvent(new Event("change"));
    });
  }
}

export const conversation = new Conversation();
