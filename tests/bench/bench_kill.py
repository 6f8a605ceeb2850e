"""Kill a process that appends, again and again, and look for its acknowledged appends.

    python tests/bench/bench_kill.py [--kills 2000] [--seed 1] [--folder DIRECTORY]

What `tests/ledger/test_kill.py` does a hundred times, in the same way: streams of all three
durabilities, objects, takeovers, checkpoints, SIGKILL at a random acknowledgement, and a
checker outside the process. It says how far it is on stderr, ends with one line of JSON, and
exits with 1 if anything was lost, doubled or reordered.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.machine import print_line  # noqa: E402
from tests.ledger.kill_checker import Checker, Nursery  # noqa: E402

MAX_ACKNOWLEDGEMENTS = 400
"""Before a kill; the least is 1."""
CHECK_EVERY = 10
SAY_EVERY = 100


def kill_again_and_again(path: Path, kills: int, random: Random) -> Checker:
    checker, nursery = Checker(path), Nursery(path)
    began = time.monotonic()
    try:
        for kill in range(1, kills + 1):
            code = nursery.life(checker, random.randint(1, MAX_ACKNOWLEDGEMENTS))
            if code != -signal.SIGKILL:
                raise SystemExit(f"a producer ended by itself with {code}")
            if kill % CHECK_EVERY == 0 or kill == kills:
                asyncio.run(checker.check())
            if kill % SAY_EVERY == 0:
                took = time.monotonic() - began
                print(f"{kill} kills, {took:.0f} s, {checker.findings}", file=sys.stderr)
    finally:
        nursery.close()
    return checker


def report(checker: Checker, kills: int, seed: int, took_s: float) -> dict[str, Any]:
    return {
        "kills": kills,
        **asdict(checker.findings),
        "seed": seed,
        "seconds": round(took_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the ledger lies: the disk to try")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "ledger.db"
        checker = kill_again_and_again(path, options.kills, Random(options.seed))
    print_line(report(checker, options.kills, options.seed, time.monotonic() - began))
    sys.exit(1 if checker.findings.broken else 0)


if __name__ == "__main__":
    main()
