"""Frames that must be refused, and what for.

The bytes and the reasons are written by hand, so that they cannot follow a mistake of the
codec.
"""

from __future__ import annotations

STREAM = bytes(range(16))


def built(tag: int, payload: str, *, corr: int = 7, version: int = 1, flags: int = 0) -> str:
    """Return a frame around payload bytes (hex), with a header that fits."""
    body = bytes((tag,)) + corr.to_bytes(4, "little") + bytes.fromhex(payload)
    head = len(body) | version << 24 | flags << 28
    return (head.to_bytes(4, "little") + body).hex()


_THE = "042074686502"  # text " the", index 2
_ID = STREAM.hex()
_OPEN_START = "0464656d6f" + "0100"  # model "demo", prompt ""
# max_tokens, temperature, top_k, top_p, min_p, three penalties, seed
_OPEN_ABSENT = "00" * 9
# From stop to n: no stop, not ignore_eos, no logprobs, no format, refuse, 1
_OPEN_PLAIN = "00" * 5 + "01"
_CALL_START = "0173" + "0161" + "03474554" + "0175"  # object "s", name "a", GET, url "u"
_OVER = "ffffffffffffffffff02"

# Each row: name, bytes, and the code, field and offset of the refusal.
BAD_HEADERS = [
    ("nothing", "", "bad_frame", "header", 0),
    ("half a header", "0500", "bad_frame", "header", 0),
    ("version 0", built(0, _THE, version=0), "bad_version", "header.version", 3),
    ("version 2", built(0, _THE, version=2), "bad_version", "header.version", 3),
    ("version 15", built(0, _THE, version=15), "bad_version", "header.version", 3),
    ("unknown flag 0x2", built(0, _THE, flags=2), "bad_frame", "header.flags", 3),
    ("unknown flag 0x8", built(0, _THE, flags=8), "bad_frame", "header.flags", 3),
    ("zstd flag, no zstd here", built(0, _THE, flags=1), "bad_frame", "header.flags", 3),
    ("length 0", "00000001", "bad_frame", "header.length", 0),
    ("length 4, no room for corr", "0400000100070000", "bad_frame", "header.length", 0),
    ("length over the limit", "0100100100" + "00000000", "bad_frame", "header.length", 0),
    ("largest length", "ffffff0100" + "00000000", "bad_frame", "header.length", 0),
    ("header alone", "0b000001", "bad_frame", "header.length", 0),
    ("last byte missing", built(0, _THE)[:-2], "bad_frame", "header.length", 0),
    ("a byte after the frame", built(0, _THE) + "00", "bad_frame", "header.length", 0),
    *(
        (f"tag {tag}, which nothing has", built(tag, _THE), "bad_frame", "tag", 4)
        for tag in (32, 33, 63, 66, 255)
    ),
]

# Each row: name, tag, payload, and the field and offset of the refusal (bad_frame).
BAD_PAYLOADS = [
    ("token without a payload", 0, "", "Token.text", 9),
    ("token, text longer than the frame", 0, "0561", "Token.text", 9),
    ("token, text of 2^64-1 bytes", 0, "ffffffffffffffffff01", "Token.text", 9),
    ("token, length not in its shortest form", 0, "8400" + "20746865" + "02", "Token.text", 9),
    ("token run, lengths longer than the frame", 30, "00" + "0501", "TokenRun.lengths", 10),
    ("token run, text not UTF-8", 30, "00" + "0101" + "01ff", "TokenRun.text", 12),
    ("token, text not UTF-8", 0, "01ff" + "02", "Token.text", 9),
    ("token, overlong UTF-8", 0, "02c080" + "02", "Token.text", 9),
    ("token, surrogate in UTF-8", 0, "03eda080" + "02", "Token.text", 9),
    ("token, text beyond U+10FFFF", 0, "04f4908080" + "02", "Token.text", 9),
    ("token, character cut off", 0, "02e282" + "02", "Token.text", 9),
    ("token without an index", 0, "0420746865", "Token.index", 14),
    ("token, index cut off", 0, "0420746865" + "80", "Token.index", 14),
    ("token, index not in its shortest form", 0, "0420746865" + "aa00", "Token.index", 14),
    ("token, index of 65 bits", 0, "0420746865" + _OVER, "Token.index", 14),
    ("token, a byte too many", 0, _THE + "00", "Token", 15),
    ("stream end, reason 7", 1, "03070309" + "0000", "StreamEnd.finish_reason", 10),
    ("stream end, optional 2", 1, "03040309" + "0200", "StreamEnd.message", 13),
    ("stream end, bool 2", 1, "03040309" + "0002", "StreamEnd.retryable", 14),
    ("stream end, message cut off", 1, "03040309" + "010261", "StreamEnd.message", 14),
    ("stream error, bool 2", 2, "0178" + "0179" + "02" + "9401", "StreamError.retryable", 13),
    ("stream error, half a status", 2, "0178" + "0179" + "00" + "94", "StreamError.status", 14),
    ("classification, f32 cut off", 3, "0161" + "0000c0", "Classification.confidence", 11),
    ("embedding, too many values", 4, "02" + "0000003f" + "00", "Embedding.values", 9),
    ("embedding, 2^64-1 values", 4, "ffffffffffffffffff01" + "00", "Embedding.values", 9),
    ("chunk, data longer than the frame", 5, "ff7f00", "Chunk.data", 9),
    ("chunk, bool 3", 5, "00" + "03" + "00", "Chunk.last", 10),
    ("revision, bool 2", 6, "00" + "00" + "02" + "00", "Revision.final", 11),
    ("revision, f32 cut off", 6, "00" + "00" + "01" + "00" + "0000", "Revision.stability", 13),
    ("snapshot, bool 2", 7, "00" + "0161" + "00" + "02", "Snapshot.reasoning", 13),
    ("heartbeat, u64 cut off", 8, "00000000000000", "Heartbeat.clock_ms", 9),
    (
        "heartbeat, second reason not UTF-8",
        8,
        "00" * 8 + "01" + "02" + "0161" + "01ff" + "00",
        "Heartbeat.reasons[1]",
        21,
    ),
    ("opened, stream id cut off", 9, _ID[:-2], "Opened.stream", 9),
    (
        "opened, second sibling's token not UTF-8",
        9,
        _ID + "00" * 4 + "02" + _ID + "00" + _ID + "01ff",
        "Opened.siblings[1].token",
        63,
    ),
    ("status, state 2", 10, _ID + "02" + "00", "Status.state", 25),
    ("hello, schema cut off", 11, "00" * 7, "Hello.schema", 9),
    ("answer, half a status", 12, "c8", "Answer.status", 9),
    ("answer, headers do not fit", 12, "c800" + "03" + "0000" * 2, "Answer.headers", 11),
    (
        "answer, second header's value not UTF-8",
        12,
        "c800" + "02" + "0161" + "0162" + "0163" + "01ff",
        "Answer.headers[1].value",
        18,
    ),
    ("body, data longer than the frame", 13, "0461", "Body.data", 9),
    ("body end with a payload", 14, "00", "BodyEnd", 9),
    (
        "scored token, logprob cut off",
        15,
        "0161" + "01" + "05" + "0461626364" + "000000",
        "ScoredToken.scores[0].chosen.logprob",
        18,
    ),
    (
        "scored token, alternatives do not fit",
        15,
        "0161" + "01" + "05" + "0161" + "00000000" + "ff01",
        "ScoredToken.scores[0].top",
        19,
    ),
    ("open, messages do not fit", 16, _OPEN_START + "ff01" + "00" * 16, "Open.messages", 16),
    (
        "open, third role not UTF-8",
        16,
        _OPEN_START
        + "03"
        + "00000000" * 2
        + "01ff"
        + "00" * 3
        + _OPEN_ABSENT
        + _OPEN_PLAIN
        + "00" * 4,
        "Open.messages[2].role",
        25,
    ),
    (
        "open, f64 cut off",
        16,
        _OPEN_START + "00" + "00" + "01" + "00" * 7,
        "Open.sampling.temperature",
        19,
    ),
    ("open, stop cut off", 16, _OPEN_START + "00" + _OPEN_ABSENT + "01" + "05", "Open.stop[0]", 27),
    (
        "open, format of kind 2",
        16,
        _OPEN_START + "00" + _OPEN_ABSENT + "00" * 3 + "01" + "02" + "00" + "00" * 6,
        "Open.format.kind",
        30,
    ),
    (
        "open, overflow 2",
        16,
        _OPEN_START + "00" + _OPEN_ABSENT + "00" * 4 + "02" + "00" * 5,
        "Open.overflow",
        30,
    ),
    (
        "open, durability 3",
        16,
        _OPEN_START + "00" + _OPEN_ABSENT + _OPEN_PLAIN + "03" + "00" * 3,
        "Open.durability",
        32,
    ),
    (
        "open, priority 3",
        16,
        _OPEN_START + "00" + _OPEN_ABSENT + _OPEN_PLAIN + "01" + "03" + "00" * 2,
        "Open.priority",
        33,
    ),
    ("resume, optional 2", 17, _ID + "02" + "00" + "01" + "00", "Resume.after", 25),
    ("resume, bool 255", 17, _ID + "00" + "00" + "ff" + "00", "Resume.follow", 27),
    ("credit, limit of 65 bits", 18, _OVER, "Credit.limit", 9),
    ("challenge, nonce cut off", 23, "00" * 31, "Challenge.nonce", 9),
    ("proof, mac cut off", 26, "00" * 31, "Proof.mac", 9),
    ("pass, a byte more", 27, "00" * 33, "Pass", 41),
    ("renew, follow is no bool", 28, _ID + "00" + "02" + "00" + "00" * 32, "Renew.follow", 26),
    ("cancel, token cut off", 19, _ID + "01" + "7f61", "Cancel.token", 26),
    ("detach with a payload", 20, "00", "Detach", 9),
    ("steer without text", 21, _ID + "00", "Steer.text", 26),
    ("input, data longer than the frame", 31, _ID + "00" + "00" + "0561", "Input.data", 27),
    (
        "switch stages, cut off",
        65,
        _ID + "00" + "01" + "0561",
        "SwitchStages.stages[0].stage",
        27,
    ),
    ("switch stages, 17 of them", 65, _ID + "0011" + "016100" * 17, "SwitchStages.stages", 26),
    ("input, last is no bool", 31, _ID + "00" + "00" + "0161" + "02", "Input.last", 29),
    ("input stored, complete is no bool", 64, _ID + "00" + "02", "InputStored.complete", 26),
    ("call, method not UTF-8", 22, _CALL_START[:8] + "01ff", "Call.method", 13),
    ("call, headers do not fit", 22, _CALL_START + "ff01" + "00" * 16, "Call.headers", 19),
    ("call, body longer than the frame", 22, _CALL_START + "00" + "0561", "Call.body", 20),
    ("call without credit", 22, _CALL_START + "00" + "00", "Call.credit", 21),
    ("notice, message not UTF-8", 24, "0161" + "01ff" + "00", "Notice.message", 11),
    ("reasoning, no index", 25, "0161", "Reasoning.index", 11),
    ("tool call, arguments not UTF-8", 29, "00" + "00" + "00" + "01ff", "ToolCall.arguments", 12),
]
