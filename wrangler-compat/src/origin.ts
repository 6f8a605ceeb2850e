/** Requests to the Tailrace edge that this one is in front of. */

import { TailraceError, unreachable } from "./errors";

/** How long a new request waits for an edge that cannot be reached. */
const CONNECT_PATIENCE_MS = 2_000;
const RETRY_MS = 100;

/** Who is let in here is let in by this edge: what its own rules look at stays here. */
const OURS = ["host", "origin", "content-length", "accept-encoding", "tailrace-opened"];

export class Origin {
  readonly #base: URL;

  constructor(url: string) {
    this.#base = new URL(url);
  }

  /** The same place at the origin's edge. */
  url(path: string): URL {
    return new URL(path, this.#base);
  }

  /** An answer, whatever its status; asked for again for as long as nobody answers at all.
   *
   * Only for what may be carried out twice. Throws `origin_unreachable`.
   */
  async ask(url: URL, init: RequestInit): Promise<Response> {
    const deadline = Date.now() + CONNECT_PATIENCE_MS;
    for (;;) {
      try {
        return await fetch(url, { redirect: "manual", ...init });
      } catch (error) {
        if (init.signal?.aborted) throw error;
        if (Date.now() >= deadline) throw unreachable("this edge has no link to an origin");
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }

  /** The answer to what must not be carried out twice. Throws `outcome_unknown`. */
  async askOnce(url: URL, init: RequestInit): Promise<Response> {
    try {
      return await fetch(url, { redirect: "manual", ...init });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new TailraceError(
        "this edge has no link to an origin: whether the request was carried out is not known",
        { code: "outcome_unknown", status: 503, retryable: true, hint: "look first" },
      );
    }
  }
}

/** The headers of a client's request as they go on. */

export function forwarded(request: Request): Headers {
  const headers = new Headers(request.headers);
  for (const name of OURS) headers.delete(name);
  const url = new URL(request.url);
  headers.set("X-Forwarded-Proto", url.protocol.slice(0, -1));
  headers.set("X-Forwarded-Host", url.host);
  const address = request.headers.get("CF-Connecting-IP");
  if (address !== null) headers.set("X-Forwarded-For", address);
  return headers;
}
