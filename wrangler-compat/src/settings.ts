/** The bindings and variables of the wrangler file. */

import type { StreamObject } from "./stream_object";

export interface Env {
  STREAMS: DurableObjectNamespace<StreamObject>;
  /** URL of the edge behind: `https://HOST[:PORT]`. */
  TAILRACE_ORIGIN_URL: string;
  /** Seconds for which a stream is stored here after its last read or write. */
  TAILRACE_RETENTION_S?: string | number;
  /** Web origins whose pages may use this edge: a list, or a string with commas. */
  TAILRACE_EDGE_ALLOWED_ORIGINS?: string | string[];
  TAILRACE_EDGE_MAX_BODY_BYTES?: string | number;
}

const RETENTION_S = 86_400;
const MAX_BODY_BYTES = 1 << 20;

export function retentionMs(env: Env): number {
  return Number(env.TAILRACE_RETENTION_S ?? RETENTION_S) * 1000;
}

export function maxBodyBytes(env: Env): number {
  return Number(env.TAILRACE_EDGE_MAX_BODY_BYTES ?? MAX_BODY_BYTES);
}

export function allowedOrigins(env: Env): string[] {
  const said = env.TAILRACE_EDGE_ALLOWED_ORIGINS ?? [];
  const list = typeof said === "string" ? said.split(",") : said;
  return list.map((each) => each.trim().toLowerCase()).filter((each) => each !== "");
}
