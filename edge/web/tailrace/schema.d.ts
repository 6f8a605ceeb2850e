// Written by `make schemas`.

/** Integers above 2^53-1 come as a bigint, whatever is said here; none occurs in
 * practice but as a seed, which says so. */
export declare const SCHEMA_ID: string;
export declare const TYPES: Record<string, string>;

export type StreamId = string;
export type Durability = "relaxed" | "process" | "power";
export type Priority = "interactive" | "standard" | "batch";
export type Compression = "zstd";
export type FinishReason = "stop" | "length" | "cancelled" | "filtered" | "failed" | "origin-lost" | "tool-calls";
export type StreamState = "running" | "ended";
export type Overflow = "refuse" | "drop-oldest";
export type Unread = "run" | "pause" | "cancel";
export type Cache = "none" | "exact";
export type FormatKind = "json-schema" | "regex";
export type ToolChoice = "auto" | "none" | "required";
export interface Token { type: "Token"; text: string; index: number }
export interface StreamEnd { type: "StreamEnd"; total_tokens: number; finish_reason: FinishReason; index: number; prompt_tokens: number; message: string | null; retryable: boolean }
export interface Classification { type: "Classification"; label: string; confidence: number; index: number }
export interface Embedding { type: "Embedding"; values: readonly (number)[]; index: number }
export interface Chunk { type: "Chunk"; data: Uint8Array; last: boolean; index: number }
export interface Revision { type: "Revision"; replaces: number; text: string; final: boolean; index: number; stability: number }
export interface Score { id: number; token: Uint8Array; logprob: number }
export interface TokenScores { chosen: Score; top: readonly (Score)[] }
export interface ScoredToken { type: "ScoredToken"; text: string; scores: readonly (TokenScores)[]; index: number }
export interface Notice { type: "Notice"; code: string; message: string; index: number }
export interface Reasoning { type: "Reasoning"; text: string; index: number }
export interface ToolCall { type: "ToolCall"; call: number; id: string; name: string; arguments: string; index: number }
export interface Snapshot { type: "Snapshot"; first: number; text: string; index: number; reasoning: boolean }
export interface TokenRun { type: "TokenRun"; first: number; lengths: Uint8Array; text: string }
export interface StreamError { type: "StreamError"; code: string; message: string; retryable: boolean; status: number; field: string | null; hint: string | null; retry_after_ms: number | null }
export interface ModelTier { model: string; tier: string; expected_ms: number; reason: string }
export interface Heartbeat { type: "Heartbeat"; clock_ms: number | bigint; ready: boolean; reasons: readonly (string)[]; models: readonly (string)[]; devices: readonly (string)[]; patience_ms: number; streams: number; room: number; corrs: number; ledger: string; tiers: readonly (ModelTier)[] }
export interface Sibling { stream: StreamId; token: string }
export interface Opened { type: "Opened"; stream: StreamId; next_index: number; token: string; model: string; prompt_tokens: number; siblings: readonly (Sibling)[]; created_ms: number | bigint; note: string | null; first: number }
export interface Status { type: "Status"; stream: StreamId; state: StreamState; next_index: number }
export interface Header { name: string; value: string }
export interface Answer { type: "Answer"; status: number; headers: readonly (Header)[] }
export interface Body { type: "Body"; data: Uint8Array }
export interface BodyEnd { type: "BodyEnd" }
export interface Hello { type: "Hello"; schema: Uint8Array; software: string; compression: Compression | null }
export interface Message { role: string; content: string; tool_calls: string | null; tool_call_id: string | null }
export interface Tools { functions: string; choice: ToolChoice; only: string | null; parallel: boolean }
export interface OutputFormat { kind: FormatKind; source: string }
export interface Sampling { temperature: number | null; top_k: number | null; top_p: number | null; min_p: number | null; repetition_penalty: number | null; presence_penalty: number | null; frequency_penalty: number | null; seed: number | bigint | null }
export interface Caller { tenant: string; rights: number; max_unfinished: number | null; tokens_per_s: number | null; key: string; tokens_per_day: number | null; tokens_per_month: number | null }
export interface Branch { stream: StreamId; index: number; token: string | null; text: string | null; instruction: string | null }
export interface StageSwitch { stage: string; on: boolean }
export interface Open { type: "Open"; model: string; prompt: string | null; messages: readonly (Message)[]; max_tokens: number | null; sampling: Sampling; stop: readonly (string)[]; ignore_eos: boolean; logprobs: number | null; format: OutputFormat | null; overflow: Overflow; n: number; durability: Durability; priority: Priority; unread: Unread; unread_after_s: number | null; idempotency_key: string | null; credit: number; caller: Caller | null; credit_bytes: number | null; tools: Tools | null; note: string | null; trace: string | null; branch: Branch | null; cache: Cache | null; stages: readonly (StageSwitch)[] }
export interface Resume { type: "Resume"; stream: StreamId; after: number | null; token: string | null; follow: boolean; credit: number; caller: Caller | null; credit_bytes: number | null; tail: number | null; since_ms: number | null; snapshot: boolean }
export interface Credit { type: "Credit"; limit: number; bytes: number | null }
export interface Cancel { type: "Cancel"; stream: StreamId; token: string | null; caller: Caller | null; forget: boolean }
export interface Detach { type: "Detach" }
export interface Steer { type: "Steer"; stream: StreamId; token: string | null; text: string; caller: Caller | null }
export interface Input { type: "Input"; stream: StreamId; token: string | null; offset: number; data: Uint8Array; last: boolean; caller: Caller | null }
export interface InputStored { type: "InputStored"; stream: StreamId; bytes: number; complete: boolean }
export interface SwitchStages { type: "SwitchStages"; stream: StreamId; token: string | null; stages: readonly (StageSwitch)[]; caller: Caller | null }
export interface Challenge { type: "Challenge"; nonce: Uint8Array }
export interface Proof { type: "Proof"; mac: Uint8Array }
export interface Pass { type: "Pass"; mac: Uint8Array }
export interface Renew { type: "Renew"; stream: StreamId; after: number | null; follow: boolean; credit: number; credit_bytes: number | null; mac: Uint8Array }
export interface Call { type: "Call"; object: string; name: string; method: string; url: string; headers: readonly (Header)[]; body: Uint8Array; credit: number; caller: Caller | null; credit_bytes: number | null }

export type Logged = Token | StreamEnd | Classification | Embedding | Chunk | Revision | ScoredToken | Notice | Reasoning | ToolCall;
export type Frame = Token | StreamEnd | StreamError | Classification | Embedding | Chunk | Revision | Snapshot | Heartbeat | Opened | Status | Hello | Answer | Body | BodyEnd | ScoredToken | Open | Resume | Credit | Cancel | Detach | Steer | Call | Challenge | Notice | Reasoning | Proof | Pass | Renew | ToolCall | TokenRun | Input | InputStored | SwitchStages;
export type FrameType = Frame["type"];

export interface FormatBody {
  json_schema?: Record<string, unknown> | null;
  regex?: string | null;
}
export interface GroupBody {
  by?: "word" | "phrase" | "sentence" | "paragraph" | null;
  ms?: number | null;
  chars?: number | null;
}
export interface MessageBody {
  role: string;
  content: string;
}
export interface UnreadBody {
  then: Unread;
  after_s?: number | null;
}
export interface GenerateInput {
  model: string;
  stop?: string | readonly (string)[] | null;
  ignore_eos?: boolean | null;
  overflow?: Overflow | null;
  n?: number | null;
  durability?: Durability | null;
  priority?: Priority | null;
  cache?: string | null;
  unread?: Unread | UnreadBody | null;
  stages?: Record<string, boolean> | null;
  temperature?: number | null;
  top_k?: number | null;
  top_p?: number | null;
  min_p?: number | null;
  repetition_penalty?: number | null;
  presence_penalty?: number | null;
  frequency_penalty?: number | null;
  seed?: number | null;
  prompt?: string | null;
  messages?: readonly (MessageBody)[] | null;
  max_tokens?: number | null;
  logprobs?: number | null;
  format?: FormatBody | null;
  chat?: string | null;
  group?: GroupBody | "word" | "phrase" | "sentence" | "paragraph" | null;
}
