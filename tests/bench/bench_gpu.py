"""Kernels on a GPU: constants, oracles, each kernel, whole steps and serving, within 9 minutes.

    make bench-gpu ARGS="--write measured.json"   # with the system's python3 and its torch
    python tests/bench/bench_gpu.py --only step,parity
    python tests/bench/bench_gpu.py --case "llama-8b.step rows=1 length=512" --loop 20
    python -m tests.bench.bench_gpu --fake        # without a GPU: tiny shapes, no figures

Each part is a child process with a timeout, so that one that dies takes nothing with it; `crash`, a
part of `--fake`, is killed to show it. `--write` puts the figures into a file after each result;
`python -m tailrace.kernels.gate.roofline --measured FILE` reads it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    # Some installed package may be called `tests`, too, and would win over a folder.
    tests = ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests
if "--fake" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from tests.bench.gpu.parts import (  # noqa: E402
    FAKE_PARTS,
    PARTS,
    SECONDS,
    loop_case,
    run_part,
    timer_of,
)
from tests.bench.gpu.place import Place  # noqa: E402
from tests.bench.gpu.supervisor import Part, Results, Supervisor, written  # noqa: E402
from tests.bench.machine import conditions, print_line  # noqa: E402


def main() -> int:
    options = _parse()
    if not options.fake and not torch.cuda.is_available():
        print("bench-gpu: no CUDA device; try --fake for a run without figures", file=sys.stderr)
        return 2
    if options.child:
        return _child(options)
    if options.case:
        return _case(options)
    base = {"date": date.today().isoformat(), "fake": options.fake, **conditions()}

    def keep(results: Results) -> None:
        if options.write is not None:
            written(options.write, base | report(results))

    supervisor = Supervisor(lambda part: _command(part, options.fake), keep, options.seconds)
    supervisor.run(options.only or (FAKE_PARTS if options.fake else PARTS))
    found = report(supervisor.results)
    print_line(base | found)
    expected = {"crash"} if options.fake else set()
    return int(bool(found["parity_failed"] or set(found["failed_parts"]) - expected))


def report(results: Results) -> dict[str, Any]:
    """Return all results, with shares of the copy bandwidth and with ratios of steps."""
    found: dict[str, Any] = {"us": {}, "parity": {}, "parity_failed": {}, "failed_parts": {}}
    found |= results
    ratios = dict(results.get("ratios", {}))
    us = found["us"]
    if copy := results.get("constants", {}).get("copy_bytes_per_s"):
        found["copy_tb_s"] = round(copy / 1e12, 3)
        moved = results.get("bytes", {})
        found["share_of_copy"] = {
            name: round(moved[name] / us[name] * 1e6 / copy, 3) for name in moved if us.get(name)
        }
    for name in us:
        if (other := f"{name} dependent") in us:
            ratios[f"{name} ordinary / dependent"] = round(us[name] / us[other], 3)
        compiled = name.replace(".step ", ".compiled ")
        if compiled != name and compiled in us:
            best = min(us[name], us.get(f"{name} dependent", us[name]))
            ratios[f"{name} torch.compile / ours"] = round(us[compiled] / best, 3)
    return found | {"ratios": ratios}


def _command(part: str, fake: bool) -> Sequence[str]:
    own = [sys.executable, str(Path(__file__).resolve()), "--child", part]
    return [*own, *(["--fake"] if fake else [])]


def _place(options: argparse.Namespace) -> Place:
    torch.manual_seed(1)
    return Place(timer_of(fake=options.fake).device, options.fake)


def _child(options: argparse.Namespace) -> int:
    with torch.inference_mode():
        run_part(options.child, _place(options), timer_of(fake=options.fake))
    return 0


def _case(options: argparse.Namespace) -> int:
    with torch.inference_mode():
        known = loop_case(options.case, _place(options), options.loop)
    if not known:
        print(f"bench-gpu: no case {options.case!r}; names are those of `us`", file=sys.stderr)
    return 0 if known else 2


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("--only", type=_parts, help=f"parts, of {names}; default: all")
    parser.add_argument("--fake", action="store_true", help="tiny shapes, without a GPU")
    parser.add_argument("--write", type=Path, metavar="FILE", help="figures as JSON, as they come")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time limit of all parts (%(default)s)"
    )
    parser.add_argument("--case", metavar="NAME", help="run one case in a loop, for a profiler")
    parser.add_argument("--loop", type=int, default=100, metavar="N", help="times (%(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _parts(text: str) -> list[Part]:
    known = {part.name: part for part in FAKE_PARTS}
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        shown = ", ".join(part.name for part in PARTS)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {shown}")
    return [known[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())
