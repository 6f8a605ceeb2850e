// Written by `make schemas`.

export const TYPES = {
  Durability: "relaxed process power",
  Priority: "interactive standard batch",
  Overflow: "refuse drop-oldest",
  Unread: "run pause cancel",
  Cache: "none exact",
  FormatKind: "json-schema regex",
  ToolChoice: "auto none required",
  TokenRun: "30 first:uint lengths:data text:str",
  Header: "name:str value:str",
  Answer: "12 status:u16 headers:list<Header>",
  Body: "13 data:data",
  BodyEnd: "14",
  Message: "role:str content:str tool_calls:optional<str> tool_call_id:optional<str>",
  Tools: "functions:str choice:ToolChoice only:optional<str> parallel:bool",
  OutputFormat: "kind:FormatKind source:str",
  Sampling: "temperature:optional<f64> top_k:optional<uint> top_p:optional<f64> min_p:optional<f64> repetition_penalty:optional<f64> presence_penalty:optional<f64> frequency_penalty:optional<f64> seed:optional<u64>",
  Caller: "tenant:str rights:uint max_unfinished:optional<uint> tokens_per_s:optional<uint> key:str tokens_per_day:optional<uint> tokens_per_month:optional<uint>",
  Branch: "stream:StreamId index:uint token:optional<str> text:optional<str> instruction:optional<str>",
  StageSwitch: "stage:str on:bool",
  Open: "16 model:str prompt:optional<str> messages:list<Message><=1024 max_tokens:optional<uint> sampling:Sampling stop:list<str><=1024 ignore_eos:bool logprobs:optional<uint> format:optional<OutputFormat> overflow:Overflow n:uint durability:Durability priority:Priority unread:Unread unread_after_s:optional<uint> idempotency_key:optional<str> credit:uint caller:optional<Caller> credit_bytes:optional<uint> tools:optional<Tools> note:optional<str> trace:optional<str> branch:optional<Branch> cache:optional<Cache> stages:list<StageSwitch><=16",
  Resume: "17 stream:StreamId after:optional<uint> token:optional<str> follow:bool credit:uint caller:optional<Caller> credit_bytes:optional<uint> tail:optional<uint> since_ms:optional<uint> snapshot:bool",
  Credit: "18 limit:uint bytes:optional<uint>",
  Cancel: "19 stream:StreamId token:optional<str> caller:optional<Caller> forget:bool",
  Detach: "20",
  Steer: "21 stream:StreamId token:optional<str> text:str caller:optional<Caller>",
  Input: "31 stream:StreamId token:optional<str> offset:uint data:data last:bool caller:optional<Caller>",
  InputStored: "64 stream:StreamId bytes:uint complete:bool",
  SwitchStages: "65 stream:StreamId token:optional<str> stages:list<StageSwitch><=16 caller:optional<Caller>",
  Challenge: "23 nonce:data[32]",
  Proof: "26 mac:data[32]",
  Pass: "27 mac:data[32]",
  Renew: "28 stream:StreamId after:optional<uint> follow:bool credit:uint credit_bytes:optional<uint> mac:data[32]",
  Call: "22 object:str name:str method:str url:str headers:list<Header> body:data credit:uint caller:optional<Caller> credit_bytes:optional<uint>",
};

/** Tags of the frames of a stream's log, each of which has an index. */
export const LOGGED = new Set([0, 1, 3, 4, 5, 6, 15, 24, 25, 29]);
/** Tags of the frames after which nothing more comes on their corr. */
export const CLOSING = new Set([1, 2, 10, 14, 64]);
/** Tags of the frames that a client may send. */
export const CLIENT = new Set([11, 16, 17, 18, 19, 20, 21, 31, 65]);
/** Fields of the body of POST /v1/generate. */
export const REQUEST_FIELDS = "model stop ignore_eos overflow n durability priority cache unread stages temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed prompt messages max_tokens logprobs format chat group".split(" ");
