// A network that the demonstration can cut. The client gets the real fetch and WebSocket with a switch:
// while the network is cut, open connections break and no new one can be opened.

import { system } from "../tailrace/connection.js";

export class CuttableNetwork {
  isCut = false;
  #breaks = new Set();
  #wakes = new Set();

  constructor() {
    const network = this;
    /** The option `system` for the client’s `stream`: a fetch and a WebSocket that can be cut. */
    this.system = {
      ...system,
      fetch: (url, init) => network.#fetch(url, init),
      WebSocket: class extends WebSocket {
        /** @param {string | URL} url @param {string[]} [protocols] */
        constructor(url, protocols) {
          if (network.isCut) throw new TypeError("the network is cut");
          super(url, protocols);
          const break_ = () => {
            this.close();
            this.dispatchEvent(new CloseEvent("close", { code: 1006 }));
          };
          network.#breaks.add(break_);
          this.addEventListener("close", () => network.#breaks.delete(break_));
        }
      },
      onWake: (wake, cut) => {
        network.#wakes.add(wake);
        const unlisten = system.onWake(wake, cut);
        return () => {
          network.#wakes.delete(wake);
          unlisten();
        };
      },
    };
  }

  /** Break all open connections, and refuse new ones. */
  cut() {
    this.isCut = true;
    for (const break_ of [...this.#breaks]) break_();
    this.#breaks.clear();
  }

  /** Allow connections again. Waiting streams reconnect at once, as after the browser's `online`
   * event.
   */
  mend() {
    this.isCut = false;
    for (const wake of [...this.#wakes]) wake();
  }

  async #fetch(url, init = {}) {
    if (this.isCut) throw new TypeError("the network is cut");
    const broken = new AbortController();
    const break_ = () => broken.abort(new TypeError("the network was cut"));
    this.#breaks.add(break_);
    init.signal?.addEventListener("abort", () => this.#breaks.delete(break_));
    const signal = init.signal ? AbortSignal.any([init.signal, broken.signal]) : broken.signal;
    return fetch(url, { ...init, signal });
  }
}
