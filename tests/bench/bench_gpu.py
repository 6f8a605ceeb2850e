"""Kernels on a GPU: parity, each kernel and whole steps as a share of the copy bandwidth.

    make bench-gpu                               # with the system's python3 and its torch
    python tests/bench/bench_gpu.py --only step,parity
    python tests/bench/bench_gpu.py --rehearse   # without a GPU: tiny shapes, no figures

Weights are random and rotate over more than L2 holds. It ends with one line of JSON; `--write`
also puts the figures into a file for `python -m tailrace.kernels.gate.roofline --measured FILE`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tailrace.kernels.shapes import BITNET_2B4T, LLAMA_8B, DecoderShape, Family  # noqa: E402
from tests.bench.machine import conditions, print_line  # noqa: E402

if TYPE_CHECKING:
    from tests.bench.gpu.cases import Case, Place
    from tests.bench.gpu.timing import Timer

PARTS = ("parity", "kernels", "attention", "step", "baseline", "exactness", "sampler")
ROWS = (1, 64)
LONG_CONTEXT = 32_768
ATTENTION_ROWS = (1, 32)
STEP_LENGTH = 512
TARGETS = {"ternary": 0.75, "attend": 0.80, "step": 0.60}
TINY_BITNET = DecoderShape("tiny-bitnet", Family.BITNET, 64, 96, 2, 4, 2, 32, 96, 512)
TINY_LLAMA = DecoderShape("tiny-llama", Family.LLAMA, 64, 96, 2, 4, 2, 32, 96, 512)


class Bench:
    """Runs the requested parts, prints each figure, and keeps all of them."""

    def __init__(self, timer: Timer, place: Place) -> None:
        self._timer = timer
        self._place = place
        self._copy = timer.copy_bytes_per_s()
        self.measured: dict[str, float] = {}
        self.shares: dict[str, float] = {}
        self.ratios: dict[str, float] = {}
        self.parity: dict[str, float] = {}
        self.failed: list[str] = []
        self._bitnet = TINY_BITNET if place.rehearsal else BITNET_2B4T
        self._rows = ROWS[:1] if place.rehearsal else ROWS
        self._llama = TINY_LLAMA if place.rehearsal else LLAMA_8B

    def run(self, parts: list[str]) -> None:
        print(f"copy: {self._copy / 1e12:.3f} TB/s, read and written")
        for part in parts:
            print(f"\n{part}")
            getattr(self, f"_{part}")()

    def report(self) -> dict[str, Any]:
        return {
            "date": date.today().isoformat(),
            "hardware": _hardware(self._place.device),
            "copy_tb_s": round(self._copy / 1e12, 3),
            "us": {name: round(us, 2) for name, us in self.measured.items()},
            "share_of_copy": {name: round(share, 3) for name, share in self.shares.items()},
            "ratios": {name: round(ratio, 3) for name, ratio in self.ratios.items()},
            "parity": self.parity,
            "parity_failed": self.failed,
        }

    def _time(self, case: Case) -> float:
        us = self._timer.microseconds(case.launches)
        share = case.bytes_moved / us * 1e6 / self._copy
        self.measured[case.name], self.shares[case.name] = us, share
        wanted = [value for word, value in TARGETS.items() if word in case.name]
        asked = f", asked {wanted[0]:.0%}" if wanted else ""
        print(f"  {case.name:48} {us:10.2f} us  {share:6.1%} of copy{asked}", flush=True)
        _forget()
        return us

    def _parity(self) -> None:
        from tests.bench.gpu.parity import BATCHES, checks

        batches = (1, 2, 9) if self._place.rehearsal else BATCHES
        shallow = [_shallow(self._bitnet), _shallow(self._llama)]
        for shape in shallow:
            for name, find, most in checks(shape, self._place.device, batches):
                found = find()
                ok = found <= most
                title = f"{shape.name}: {name}"
                self.parity[title] = found
                if not ok:
                    self.failed.append(title)
                print(f"  {title:48} {'equal' if found == 0 else found} {'' if ok else 'FAILED'}")
                _forget()

    def _kernels(self) -> None:
        from tests.bench.gpu import cases

        for rows in self._rows:
            for case in cases.ternary_linears(self._place, self._bitnet, rows):
                self._time(case)
            self._time(cases.int8_heads(self._place, self._bitnet, rows))
            for case in cases.dense_linears(self._place, self._llama, rows):
                self._time(case)

    def _attention(self) -> None:
        from tests.bench.gpu import cases

        length = 300 if self._place.rehearsal else LONG_CONTEXT
        for shape in (self._bitnet, self._llama):
            for rows in ATTENTION_ROWS[: 1 if self._place.rehearsal else None]:
                for dtype in (torch.bfloat16, torch.int8):
                    self._time(cases.attention(self._place, shape, rows, length, dtype))

    def _sampler(self) -> None:
        from tests.bench.gpu import cases

        for rows in self._rows:
            self._time(cases.sampler(self._place, self._bitnet, rows))

    def _step(self) -> None:
        for int8_head in (False, True):
            us = self._time_both(self._bitnet, 1, int8_head)
            print(f"    {1e6 / us:.0f} tokens/s")
        for rows in self._rows:
            self._time_both(self._llama, rows)

    def _time_both(self, shape: DecoderShape, rows: int, int8_head: bool = False) -> float:
        """Us of the quicker of ordinary and dependent launches; says which that is."""
        ordinary, dependent = (
            self._time_step(shape, rows, int8_head, dependent) for dependent in (False, True)
        )
        head = " int8 head" if int8_head else ""
        self.ratios[f"{shape.name} rows={rows}{head} ordinary / dependent"] = ordinary / dependent
        better = "dependent" if dependent < ordinary else "ordinary"
        print(f"    {better} launches; dependent ones are {ordinary / dependent:.2f} times as fast")
        return min(ordinary, dependent)

    def _time_step(
        self, shape: DecoderShape, rows: int, int8_head: bool = False, dependent: bool = False
    ) -> float:
        from tests.bench.gpu import cases
        from tests.kernels.random_decoder import Recipe, random_decoder

        recipe = Recipe(
            shape,
            self._place.device,
            rows,
            rows,
            STEP_LENGTH,
            int8_head=int8_head,
            dependent=dependent,
        )
        decoder = random_decoder(recipe)
        moved = step_bytes(shape, rows, STEP_LENGTH, int8_head)
        case = cases.step(decoder, recipe.tables(), rows, STEP_LENGTH, moved)
        kind = f"{' int8 head' if int8_head else ''}{' dependent' if dependent else ''}"
        return self._time(type(case)(case.name + kind, case.launches, moved))

    def _exactness(self) -> None:
        """Compare the tile that follows from a weight's shape with the fastest tile."""
        from tests.bench.gpu import cases

        for rows in self._rows:
            for name, committed, others in cases.tiles(self._place, self._llama, rows):
                ours = self._time(committed)
                best = min(self._time(case) for case in others)
                self.ratios[f"{name} rows={rows} committed / best tile"] = ours / min(ours, best)

    def _baseline(self) -> None:
        from tests.bench.gpu.baseline import compiled_step
        from tests.bench.gpu.cases import Case

        for rows in self._rows:
            launch = compiled_step(
                self._llama, rows, STEP_LENGTH, self._place.device, self._place.rehearsal
            )
            moved = step_bytes(self._llama, rows, STEP_LENGTH, False)
            name = f"{self._llama.name}.compiled rows={rows} length={STEP_LENGTH}"
            us = self._time(Case(name, [launch], moved))
            step = f"{self._llama.name}.step rows={rows} length={STEP_LENGTH}"
            both = [self.measured.get(name) for name in (step, f"{step} dependent")]
            if ours := min(filter(None, both), default=None):
                self.ratios[f"{self._llama.name} rows={rows} / torch.compile"] = us / ours
                print(f"    ours is {us / ours:.2f} times as fast")


def step_bytes(shape: DecoderShape, rows: int, length: int, int8_head: bool) -> int:
    """Return what a step must read at least: weights once, and every row's keys and values."""
    per_weight = 0.25 if shape.family is Family.BITNET else 2.0
    linears = sum(outputs * inputs for outputs, inputs in shape.linears.values())
    head = shape.vocab * shape.hidden * (1 if int8_head else 2)
    cache = rows * length * 2 * shape.keys * 2
    return int(shape.layers * (linears * per_weight + cache)) + head


def _shallow(shape: DecoderShape) -> DecoderShape:
    """Return the shape with two layers, which are enough for parity."""
    fields = {name: getattr(shape, name) for name in shape.__slots__}
    return DecoderShape(**{**fields, "layers": 2})


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _hardware(device: torch.device) -> dict[str, str]:
    import triton

    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU: rehearsal"
    return {"gpu": name, "torch": torch.__version__, "triton": triton.__version__}


def main() -> int:
    options = _parse()
    if not options.rehearse and not torch.cuda.is_available():
        print(
            "bench-gpu: no CUDA device; try --rehearse for a run without figures", file=sys.stderr
        )
        return 2
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.bench.gpu.cases import Place
    from tests.bench.gpu.timing import GraphTimer, RehearsalTimer

    timer = RehearsalTimer() if options.rehearse else GraphTimer()
    torch.manual_seed(1)
    bench = Bench(timer, Place(timer.device, options.rehearse))
    with torch.inference_mode():
        bench.run(options.only)
    report = bench.report()
    if options.write:
        options.write.write_text(json.dumps(conditions() | report, indent=1) + "\n")
    print_line(report)
    return 1 if bench.failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--only", type=_parts, default=list(PARTS), help=f"of {','.join(PARTS)}; default: all"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, without a GPU")
    parser.add_argument("--write", type=Path, metavar="FILE", help="figures as JSON")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
