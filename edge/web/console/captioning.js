// Live captions of the microphone: sends its sound to a pipeline, and collects the text that returns.

import { stream } from "../tailrace/index.js";
import { InputWriter } from "../tailrace/input.js";
import { key } from "./api.js";
import { CuttableNetwork } from "./cuttable_network.js";
import { openMicrophone } from "./microphone.js";
import { peak } from "./pcm.js";

const URL_OF_STREAMS = "/v1/generate";
/** Number of blocks in the drawing of the sound: about 10 s. */
export const SHOWN_BLOCKS = 240;
/** Number of revisions that are listed. */
const SHOWN_REVISIONS = 12;

/** One session with the microphone. It sends a `change` event whenever something of it has changed. */
export class Captioning extends EventTarget {
  /** @type {"off" | "starting" | "on" | "ending"} */
  state = "off";
  /** Loudest sample of each of the newest blocks, from 0 to 1. @type {number[]} */
  levels = [];
  /** Texts that do not change any more. @type {string[]} */
  finals = [];
  /** Text that may still change. */
  interim = "";
  /** The newest revisions, newest first.
   * @type {{index: number, text: string, final: boolean, stability: number}[]}
   */
  revisions = [];
  storedBytes = 0;
  resumes = 0;
  /** @type {(Error & {hint?: string | null}) | null} */
  error = null;
  network = new CuttableNetwork();
  #close = () => {};
  /** @type {InputWriter | null} */
  #writer = null;
  /** @type {import("../tailrace/index.js").Stream | null} */
  #reading = null;

  /** Begin to listen. @param {string} model the name of a pipeline with input = "pcm" */
  async start(model) {
    Object.assign(this, { state: "starting", levels: [], finals: [], interim: "", revisions: [], error: null });
    Object.assign(this, { storedBytes: 0, resumes: 0 });
    this.#changed();
    try {
      this.#close = await openMicrophone((pcm) => this.#heard(pcm));
    } catch (error) {
      return this.#failed(error);
    }
    const apiKey = key.get() || null;
    const { system } = this.network;
    const input = { model, prompt: "", unread: /** @type {const} */ ("cancel") };
    this.#reading = stream(URL_OF_STREAMS, { input, apiKey, system, onState: () => this.#changed() });
    this.#writer = new InputWriter(URL_OF_STREAMS, this.#reading, { apiKey, system });
    this.state = "on";
    this.#changed();
    await this.#read(this.#reading);
  }

  /** Close the microphone. The text of what was said is still completed. */
  stop() {
    this.#close();
    this.#close = () => {};
    if (this.state !== "on") return;
    this.state = "ending";
    this.#writer?.close().catch((error) => this.#failed(error));
    this.#changed();
  }

  toggleNetwork() {
    if (this.network.isCut) this.network.mend();
    else this.network.cut();
    this.#changed();
  }

  get waitingBytes() {
    return this.#writer?.waiting ?? 0;
  }

  #heard(pcm) {
    this.levels = [...this.levels, peak(pcm)].slice(-SHOWN_BLOCKS);
    this.#changed();
    if (this.state !== "on") return;
    this.#writer?.write(pcm).then(
      ({ bytes }) => {
        this.storedBytes = bytes;
      },
      (error) => this.#failed(error),
    );
  }

  async #read(reading) {
    try {
      for await (const frame of reading) this.#take(frame);
      if (reading.end && !["stop", "length"].includes(reading.end.finish_reason)) {
        throw new Error(reading.end.message ?? reading.end.finish_reason);
      }
    } catch (error) {
      return this.#failed(error);
    }
    this.#close();
    this.state = "off";
    this.#changed();
  }

  #take(frame) {
    if (frame.type === "Revision") {
      const { index, text, final, stability = 0 } = frame;
      this.revisions = [{ index, text, final, stability }, ...this.revisions].slice(0, SHOWN_REVISIONS);
      if (final) this.finals.push(text);
      this.interim = final ? "" : text;
    } else if (frame.type === "Token") {
      this.finals.push(frame.text);
    }
    this.resumes = this.#reading?.resumes ?? 0;
    this.#changed();
  }

  #failed(error) {
    this.#close();
    this.#reading?.detach();
    this.error ??= error;
    this.state = "off";
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}
