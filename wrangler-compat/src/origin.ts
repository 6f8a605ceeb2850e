/** Requests to the Tailrace edge behind this Worker. */

import { TailraceError, unreachable } from "./errors";

/** Time for which a request is repeated while the edge behind cannot be reached. */
const CONNECT_TIMEOUT_MS = 2_000;
const RETRY_MS = 100;

/** Request headers that are not forwarded. The Worker itself checks the host and the page. */
const NOT_FORWARDED = ["host", "origin", "content-length", "accept-encoding", "tailrace-opened"];

export class Origin {
  readonly #base: URL;

  constructor(url: string) {
    this.#base = new URL(url);
  }

  /** Return the URL of a path at the edge behind. */
  url(path: string): URL {
    return new URL(path, this.#base);
  }

  /** Send a request that may be carried out twice, and return the answer, whatever its status.
   *
   * The request is repeated while the edge cannot be reached. Throws `origin_unreachable`.
   */
  async ask(url: URL, init: RequestInit): Promise<Response> {
    const deadline = Date.now() + CONNECT_TIMEOUT_MS;
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

  /** Send a request that must not be carried out twice, and return the answer. Throws
   * `outcome_unknown`.
   */
  async askOnce(url: URL, init: RequestInit): Promise<Response> {
    try {
      return await fetch(url, { redirect: "manual", ...init });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new TailraceError(
        "this edge has no link to an origin: it is not known whether the request was carried out",
        { code: "outcome_unknown", status: 503, retryable: true, hint: "check first" },
      );
    }
  }
}

/** Return the headers with which a client's request is forwarded. */
export function forwarded(request: Request): Headers {
  const headers = new Headers(request.headers);
  for (const name of NOT_FORWARDED) headers.delete(name);
  const url = new URL(request.url);
  headers.set("X-Forwarded-Proto", url.protocol.slice(0, -1));
  headers.set("X-Forwarded-Host", url.host);
  const address = request.headers.get("CF-Connecting-IP");
  if (address !== null) headers.set("X-Forwarded-For", address);
  return headers;
}
