// Requests to the operators' API. The key stays in this tab's sessionStorage and is never in a URL.

import { useEffect, useRef, useState } from "./ui.js";

const KEY = "tailrace.key";
export const EVERY_MS = 1000;
/** Timeout of a request, after which it is repeated. */
const PATIENCE_MS = 10_000;

export class ApiError extends Error {
  /** @param {number} status @param {{code?: string, message?: string, hint?: string, field?: string}} [error] */
  constructor(status, { code, message, hint, field } = {}) {
    super(field && message ? `${field}: ${message}` : message || `The edge answered ${status}.`);
    Object.assign(this, { status, code: code || "unknown", hint });
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set(text) {
    text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY);
    window.dispatchEvent(new Event("tailrace-key"));
  },
};

/** Return the headers that identify the operator. */
export const credentials = /** @returns {Record<string, string>} */ () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

/**
 * @param {string} path
 * @param {{query?: Record<string, any>, method?: string, body?: BodyInit, signal?: AbortSignal}} [how]
 */
export async function ask(path, { query = {}, method = "GET", body, signal } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const search = new URLSearchParams(given).toString();
  const limit = AbortSignal.timeout(method === "GET" ? PATIENCE_MS : 90_000);
  let answer;
  try {
    answer = await fetch(`/v1/admin/${path}${search && `?${search}`}`, {
      method,
      body,
      headers: credentials(),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, { code: "away", message: "The edge cannot be reached." });
  }
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new ApiError(answer.status, said.error);
  return said;
}

/** Return true if the error says that a key is missing, or that this key is not allowed. */
export const needsKey = (error) =>
  error && ["no_key", "bad_key", "missing_right"].includes(error.code);

/**
 * @param {(signal: AbortSignal) => Promise<any>} load
 * @param {unknown[]} [deps]
 * @param {number | ((told: any) => number)} [everyMs]
 *
 * Load data with `load(signal)` every second while the tab is visible, and at once when `deps` change.
 * Return `{ data, error, again }`. The last data stays when a request fails. `everyMs` may be a
 * function of the data.
 */
export function usePolled(load, deps = [], everyMs = EVERY_MS) {
  const [told, setTold] = useState({ data: null, error: null });
  const now = useRef(() => {});
  useEffect(() => {
    let timer = 0;
    let stopped = false;
    let asking = null;
    let last = null;
    async function turn() {
      clearTimeout(timer);
      asking?.abort();
      const mine = (asking = new AbortController());
      try {
        const data = (last = await load(mine.signal));
        if (!mine.signal.aborted) setTold({ data, error: null });
      } catch (error) {
        if (!mine.signal.aborted) setTold(({ data }) => ({ data, error }));
      }
      if (stopped || mine !== asking) return;
      if (!document.hidden) timer = setTimeout(turn, typeof everyMs === "number" ? everyMs : everyMs(last));
    }
    const seen = () => !document.hidden && turn();
    now.current = turn;
    document.addEventListener("visibilitychange", seen);
    window.addEventListener("tailrace-key", turn);
    turn();
    return () => {
      stopped = true;
      clearTimeout(timer);
      asking?.abort();
      document.removeEventListener("visibilitychange", seen);
      window.removeEventListener("tailrace-key", turn);
    };
  }, deps);
  return { ...told, again: () => now.current() };
}
