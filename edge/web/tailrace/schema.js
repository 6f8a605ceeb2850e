// Written by `make schemas`.

export const SCHEMA_ID = "ae77c0850a54ac4b";

export const TYPES = {
  StreamId: "data[16]",
  Compression: "zstd",
  FinishReason: "stop length cancelled filtered failed origin-lost tool-calls",
  StreamState: "running ended",
  Token: "0 text:str index:uint",
  StreamEnd: "1 total_tokens:uint finish_reason:FinishReason index:uint prompt_tokens:uint message:optional<str> retryable:bool",
  Classification: "3 label:str confidence:f32 index:uint",
  Embedding: "4 values:list<f32> index:uint",
  Chunk: "5 data:data last:bool index:uint",
  Revision: "6 replaces:uint text:str final:bool index:uint stability:f32",
  Score: "id:uint token:data logprob:f32",
  TokenScores: "chosen:Score top:list<Score>",
  ScoredToken: "15 text:str scores:list<TokenScores> index:uint",
  Notice: "24 code:str message:str index:uint",
  Reasoning: "25 text:str index:uint",
  ToolCall: "29 call:uint id:str name:str arguments:str index:uint",
  Snapshot: "7 first:uint text:str index:uint reasoning:bool",
  StreamError: "2 code:str message:str retryable:bool status:u16 field:optional<str> hint:optional<str> retry_after_ms:optional<uint>",
  ModelTier: "model:str tier:str expected_ms:uint reason:str",
  Heartbeat: "8 clock_ms:u64 ready:bool reasons:list<str> models:list<str> devices:list<str> patience_ms:uint streams:uint room:uint corrs:uint ledger:str tiers:list<ModelTier>",
  Sibling: "stream:StreamId token:str",
  Opened: "9 stream:StreamId next_index:uint token:str model:str prompt_tokens:uint siblings:list<Sibling> created_ms:u64 note:optional<str> first:uint",
  Status: "10 stream:StreamId state:StreamState next_index:uint",
  Hello: "11 schema:data[8] software:str compression:optional<Compression>",
};
