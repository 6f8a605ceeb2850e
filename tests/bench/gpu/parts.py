"""The parts of the bench: what each runs, in a child process of its own."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import product

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tailrace.kernels.ahead import compile_ahead, planned
from tailrace.kernels.shapes import DecoderShape
from tests.bench.gpu import cases
from tests.bench.gpu.cases import Case
from tests.bench.gpu.chain import chain
from tests.bench.gpu.constants import constants
from tests.bench.gpu.oracle import Check, oracle_checks
from tests.bench.gpu.parity import BATCHES, STEPS, decoder_checks, size_checks
from tests.bench.gpu.place import Place, two_layers
from tests.bench.gpu.supervisor import Part, found
from tests.bench.gpu.timing import GRAPH_STEPS, FakeTimer, GraphTimer, Recorder, Timer
from tests.bench.gpu.work import step_bytes
from tests.kernels.random_decoder import Recipe, random_decoder

LINEAR_ROWS = (1, 8, 64, 256)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL_ROWS = (64, 128, 256, 512)
PREFILL_STARTS = (0, 4096)
LONG_CONTEXT = 32_768
ATTENTION_ROWS = (1, 32)
TARGETS = {"ternary": 0.75, "attend": 0.80, "step": 0.60}
"""Shares of the copy bandwidth that are asked of cases whose name has the word."""
SM_90 = GPUTarget("cuda", 90, 32)
SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw",
    "power.limit", "temperature.gpu", "mig.mode.current", "ecc.mode.current", "vbios_version",
)  # fmt: skip
SMI_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are made together; the name of each contains all of `words`."""

    words: tuple[str, ...]
    make: Callable[[], Iterable[Case]]


def case_groups(place: Place) -> dict[str, list[Group]]:
    """Return the cases of each part that times some."""
    rows = (1,) if place.fake else LINEAR_ROWS
    bitnet, llama, qwen = place.bitnet, place.llama, place.qwen
    kernels: list[Group] = []
    quantised: list[Group] = []
    for count in rows:
        some: list[tuple[DecoderShape, str, Callable[[], Iterable[Case]]]] = [
            (bitnet, "ternary", partial(cases.ternary_linears, place, bitnet, count)),
            (bitnet, "int8", lambda count=count: [cases.int8_heads(place, bitnet, count)]),  # type: ignore[misc]
            (bitnet, "", partial(cases.norms, place, bitnet, count)),
            (llama, "bf16", partial(cases.dense_linears, place, llama, count)),
            (qwen, "bf16", partial(cases.dense_linears, place, qwen, count)),
        ]
        kernels += [Group((shape.name, word, f"rows={count}"), make) for shape, word, make in some]
        quantised += [
            Group(
                (llama.name, f"int{bits}", f"rows={count}"),
                partial(cases.quantised_linears, place, llama, count, bits),
            )
            for bits in (8, 4)
        ]
    return {
        "kernels": kernels,
        "quantised": quantised,
        "attention": list(_attention_groups(place)),
        "prefill": list(_prefill_groups(place)),
        "step": list(_step_groups(place)),
        "sampler": [
            Group(
                (bitnet.name, "sample", f"rows={count}"),
                lambda count=count: [cases.sampler(place, bitnet, count)],  # type: ignore[misc]
            )
            for count in rows
        ],
    }


def _attention_groups(place: Place) -> Iterator[Group]:
    length = place.length if place.fake else LONG_CONTEXT
    dtypes = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    rows = ATTENTION_ROWS[: 1 if place.fake else None]
    for shape, count, dtype in product((place.bitnet, place.llama), rows, dtypes):
        make = partial(cases.attention, place, shape, count, length, dtype)
        words = (shape.name, "attend", str(dtype).removeprefix("torch."), f"rows={count}")
        yield Group(words, lambda make=make: [make()])  # type: ignore[misc]


def _prefill_groups(place: Place) -> Iterator[Group]:
    sizes = ((3, 0),) if place.fake else product(PREFILL_ROWS, PREFILL_STARTS)
    shapes = (place.bitnet, place.llama)
    for (rows, start), shape in product(sizes, shapes):
        make = partial(_prefill_case, place, shape, rows, start)
        yield Group((shape.name, "prefill", f"rows={rows}"), make)


def _prefill_case(place: Place, shape: DecoderShape, rows: int, start: int) -> list[Case]:
    recipe = Recipe(shape, place.device, rows, 1, start + rows)
    moved = step_bytes(shape, 1, start + rows, False)
    return [cases.prefill(random_decoder(recipe), recipe.tables(), rows, start, moved)]


def _step_groups(place: Place) -> Iterator[Group]:
    """Yield steps with ordinary and with dependent launches, and those of other formats."""
    rows = (1,) if place.fake else STEP_ROWS
    for count, dependent in product(rows, (False, True)):
        for shape in (place.bitnet, place.llama):
            make = partial(_step_case, place, shape, count, dependent)
            yield Group((shape.name, "step", f"rows={count}"), make)
    for dependent in (False, True):
        make = partial(_step_case, place, place.bitnet, 1, dependent, int8_head=True)
        yield Group((place.bitnet.name, "step", "int8 head"), make)
        make = partial(_step_case, place, place.qwen, 1, dependent)
        yield Group((place.qwen.name, "step"), make)


def _step_case(
    place: Place, shape: DecoderShape, rows: int, dependent: bool, *, int8_head: bool = False
) -> list[Case]:
    recipe = Recipe(
        shape, place.device, rows, rows, place.length, int8_head=int8_head, dependent=dependent
    )
    moved = step_bytes(shape, rows, place.length, int8_head)
    case = cases.step(random_decoder(recipe), recipe.tables(), rows, place.length, moved)
    kind = " int8 head" * int8_head + " dependent" * dependent
    return [Case(case.name + kind, case.launches, moved, case.graph_launches)]


def run_part(name: str, place: Place, timer: Timer) -> None:
    """Run one part, which tells its results to the parent process."""
    groups = case_groups(place)
    if name in groups:
        for group in groups[name]:
            for case in group.make():
                _time(case, timer)
                del case
                _forget()
        return
    RUNS[name](place, timer)


def loop_case(name: str, place: Place, count: int) -> bool:
    """Run one case `count` times, for a profiler; return False if there is none of this name."""
    for groups in case_groups(place).values():
        for group in groups:
            if all(word in name for word in group.words):
                for case in group.make():
                    if case.name == name:
                        _loop(case, place, count)
                        return True
    return False


def _loop(case: Case, place: Place, count: int) -> None:
    on_gpu = place.device.type == "cuda"
    for at in range(count):
        if on_gpu:
            torch.cuda.nvtx.range_push(case.name)  # type: ignore[no-untyped-call]
        case.launches[at % len(case.launches)]()
        if on_gpu:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.synchronize()
    print(f"{case.name}: {count} times")


def _time(case: Case, timer: Timer) -> None:
    us = timer.microseconds(case.launches, case.graph_launches)
    wanted = [share for word, share in TARGETS.items() if word in case.name]
    asked = f", asked {wanted[0]:.0%} of copy" if wanted else ""
    rate = case.bytes_moved / us / 1e6
    print(f"  {case.name:56} {us:10.2f} us  {rate:6.3f} TB/s{asked}", flush=True)
    found("us", case.name, round(us, 3))
    found("bytes", case.name, case.bytes_moved)
    found("spread", case.name, round(timer.spread, 4))


def _tell(check: Check, prefix: str = "") -> None:
    value = check.difference()
    title = f"{prefix}{check.name}"
    fine = value <= check.most
    print(
        f"  {title:72} {value:10.3g} {'' if fine else f'FAILED, most {check.most:g}'}", flush=True
    )
    found("parity", title, value)
    if not fine:
        found("parity_failed", title, value)
    _forget()


def _machine(place: Place, _timer: Timer) -> None:
    """Tell what hardware and software this is, and the clocks and the power that it has now."""
    import triton

    found("hardware", "torch", torch.__version__)
    found("hardware", "triton", triton.__version__)
    if place.device.type != "cuda":
        found("hardware", "gpu", "no GPU: fake")
        return
    properties = torch.cuda.get_device_properties(place.device)
    found("hardware", "gpu", properties.name)
    found("hardware", "multiprocessors", properties.multi_processor_count)
    found("hardware", "capability", f"sm_{properties.major}{properties.minor}")
    found("hardware", "memory_mib", properties.total_memory >> 20)
    query = [f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=SMI_SECONDS
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        print(f"  nvidia-smi says nothing: {error}")
        return
    for field, value in zip(SMI_FIELDS, told.split(", "), strict=False):
        found("gpu_state", field, value)


def _compile(place: Place, _timer: Timer) -> None:
    """Compile what the other parts launch, in parallel, with one set of weights and two layers."""
    target = driver.active.get_current_target() if place.device.type == "cuda" else SM_90
    planning = Place(place.device, place.fake, planning=True)
    timer = FakeTimer() if place.fake else Recorder()

    def launch() -> None:
        for name in PLANNED if not place.fake else ("sampler",):
            with redirect_stdout(StringIO()):
                run_part(name, planning, timer)

    wanted = planned(launch, target)
    count = compile_ahead(wanted, target, lambda _done, _of: None)
    print(f"  {count} of {len(wanted)} kernels were compiled, on {os.cpu_count()} processors")
    found("compile", "kernels", count)


def _oracle(place: Place, _timer: Timer) -> None:
    for check in oracle_checks(place):
        _tell(check)


def _whole(place: Place, _timer: Timer) -> None:
    from tests.bench.gpu.whole_step import step_checks

    for check in step_checks(place):
        _tell(check)


def _parity(place: Place, _timer: Timer) -> None:
    batches, steps = ((1, 2), 2) if place.fake else (BATCHES, STEPS)
    sizes = set[tuple[int, int, int]]()
    for shape in (two_layers(place.bitnet), two_layers(place.llama)):
        size = (shape.hidden, shape.ffn, shape.vocab)
        # The tiny shapes of a fake run have the same sizes, so the first one is enough.
        wanted = [] if size in sizes else [*size_checks(shape, place.device)]
        wanted += decoder_checks(shape, place.device, batches, steps, place.length)
        sizes.add(size)
        for name, find, most in wanted:
            _tell(Check(name, find, most), f"{shape.name}: ")


def _chain(place: Place, _timer: Timer) -> None:
    chain(place)


def _serving(place: Place, _timer: Timer) -> None:
    from tests.bench.gpu.serving import serving

    serving(place)


def _baseline(place: Place, timer: Timer) -> None:
    from tests.bench.gpu.baseline import compiled_step

    shape = place.llama
    for rows in (1,) if place.fake else (1, 64):
        launch = compiled_step(shape, rows, place.length, place.device, place.fake)
        moved = step_bytes(shape, rows, place.length, False)
        name = f"{shape.name}.compiled rows={rows} length={place.length}"
        _time(Case(name, [launch], moved, GRAPH_STEPS), timer)
        _forget()


def _exactness(place: Place, timer: Timer) -> None:
    """Compare the tile that follows from a weight's shape with the fastest tile."""
    for rows in (1,) if place.fake else (1, 64):
        for name, committed, others in cases.tiles(place, place.llama, rows):
            own = timer.microseconds(committed.launches)
            best = min(timer.microseconds(case.launches) for case in others)
            ratio = own / min(own, best)
            title = f"{name} rows={rows} committed / best tile"
            print(f"  {title:56} {ratio:6.3f}", flush=True)
            found("ratios", title, round(ratio, 4))
            _forget()


def _crash(_place: Place, _timer: Timer) -> None:
    """Find something and be killed, as a process is that reads memory that is not there."""
    found("us", "before the crash", 1.0)
    os.kill(os.getpid(), 9)


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


RUNS: dict[str, Callable[[Place, Timer], None]] = {
    "machine": _machine,
    "compile": _compile,
    "constants": constants,
    "oracle": _oracle,
    "whole": _whole,
    "parity": _parity,
    "chain": _chain,
    "serving": _serving,
    "baseline": _baseline,
    "exactness": _exactness,
    "crash": _crash,
}
PARTS = (
    Part("machine", 30), Part("compile", 120), Part("constants", 40), Part("oracle", 60),
    Part("parity", 60), Part("chain", 90), Part("kernels", 60), Part("quantised", 40),
    Part("attention", 40), Part("prefill", 60), Part("step", 90), Part("sampler", 20),
    Part("serving", 75), Part("whole", 60), Part("baseline", 60), Part("exactness", 60),
)  # fmt: skip
"""All parts in their order: what the kernels are judged by comes first."""
FAKE_SECONDS = 240
FAKE_PARTS = tuple(
    Part(part.name, FAKE_SECONDS) for part in (*PARTS[:9], Part("crash", 30), *PARTS[9:])
)
"""The same, and in the middle a part that is killed; the interpreter is given more time."""
PLANNED = (
    "constants", "oracle", "parity", "chain", "kernels", "quantised", "attention", "prefill",
    "step", "sampler",
)  # fmt: skip
"""Parts whose launches are compiled ahead; a loaded model compiles for itself."""
SECONDS = 530
"""Time limit in seconds of all parts together: a machine may be lent for 10 minutes."""


def timer_of(*, fake: bool) -> Timer:
    """Return the timer of this machine."""
    return FakeTimer() if fake else GraphTimer()
