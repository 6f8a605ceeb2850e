"""Times the token path of the wire codec: `python tests/bench/bench_frame.py`.

CPU time of one process, the best of many short repeats, so that what else runs on the machine
weighs little; the last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from timeit import repeat

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.frame import (  # noqa: E402
    CODEC,
    Open,
    Splitter,
    Token,
    decode,
    encode,
    index_of,
    patch_corrs,
)
from tests.bench.machine import print_line  # noqa: E402

CALLS = 20_000
REPEATS = 40  # short and many: the best one falls between the work of others


def microseconds(act: Callable[[], object], calls: int = CALLS) -> float:
    """Return the best time of one call, less that of calling nothing."""
    best = min(repeat(act, timer=process_time, number=calls, repeat=REPEATS))
    empty = min(repeat(lambda: None, timer=process_time, number=calls, repeat=REPEATS))
    return round((best - empty) / calls * 1e6, 3)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    token = Token(" the", 42)
    raw = encode(token, 7)
    buf = bytearray(raw)
    request = Open("demo", prompt="Once upon a time", max_tokens=64, credit=256)
    raw_request = encode(request, 7)
    burst = raw * 64
    figures: dict[str, float | int | str] = {
        "encode_us": microseconds(lambda: encode(token, 7)),
        "decode_us": microseconds(lambda: decode(raw)),
        "patch_us": microseconds(lambda: patch_corrs(buf, ((0, 9),))),
        "token_frame_bytes": len(raw),
        "table_encode_us": microseconds(lambda: CODEC.encode(token, 7)),
        "table_decode_us": microseconds(lambda: CODEC.decode(raw)),
        "open_encode_us": microseconds(lambda: encode(request, 7), CALLS // 10),
        "open_decode_us": microseconds(lambda: decode(raw_request), CALLS // 10),
        "index_of_us": microseconds(lambda: index_of(raw)),
        "split_us_per_frame": round(
            microseconds(lambda: Splitter().feed(burst), CALLS // 100) / 64, 3
        ),
    }
    for name, figure in figures.items():
        print(f"{name:20} {figure}")
    print_line(figures)


if __name__ == "__main__":
    main()
