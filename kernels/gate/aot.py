"""The ahead-of-time gate: every kernel at its real shapes, compiled for sm_90 and read.

`python -m kernels.gate.aot` needs no GPU. It fails on a kernel that does not compile, that spills
registers, that adds floats atomically, that lacks an instruction it was written for, that reads
what it must not, writes or ends before it has waited for the launches ahead (`dependent_triton`),
that wants more shared memory than the machine has, or that is launched somewhere but planned
nowhere; and on a decode step of more than five launches per layer. Its last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from threading import Timer
from typing import Any

from kernels.gate.aot_gate import Compiled, Gate
from kernels.gate.aot_report import Progress, print_report

ANSWER_SECONDS = 600
"""How long a worker may compile one variant, or import everything."""
ERROR_LINES = 12
"""Lines of a worker's last words that are shown."""


class WorkerError(Exception):
    """A worker ended or was ended; the text is the end of its standard error."""


class Worker:
    """A process of `kernels.gate.aot_worker`; `contents` is what there is to compile."""

    def __init__(self, package: str) -> None:
        # A file, not a pipe: nobody reads it while the process runs.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kernels.gate.aot_worker", package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )
        self.contents = self._answer()

    def compile(self, place: int) -> dict[str, Any]:
        """The machine code of the variant at `place`; raises WorkerError, which ends it."""
        assert self._process.stdin is not None
        print(place, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = Timer(ANSWER_SECONDS, self._process.kill)
        alarm.start()
        line = self._process.stdout.readline()
        alarm.cancel()
        if not line.endswith("\n"):
            raise WorkerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").splitlines()
        self.close()
        return "\n".join(lines[-ERROR_LINES:]) or f"no answer, exit status {code}"


def compile_all(package: str, only: str, jobs: int, progress: Progress) -> Gate:
    """Compile what there is, identical compilations once; raises WorkerError if it cannot list."""
    first = Worker(package)
    contents = first.contents
    chosen: dict[str, list[int]] = {}
    wanted = [
        (place, variant)
        for place, variant in enumerate(contents["variants"])
        if only in f"{variant['kernel']} {variant['module']} {variant['name']}"
    ]
    for place, variant in wanted:
        chosen.setdefault(variant["key"], []).append(place)
    for _, variant in wanted:
        # An ordinary launch is its dependent twin without the wait: one of them is enough.
        if variant["key"] in chosen and variant["twin"] in chosen.keys() - {variant["key"]}:
            chosen[variant["twin"]] += chosen.pop(variant["key"])
    idle: SimpleQueue[Worker | None] = SimpleQueue()
    for worker in [first, *[None] * (jobs - 1)]:
        idle.put(worker)

    def compile_one(places: list[int]) -> Compiled:
        uses = [contents["variants"][place] for place in places]
        worker = idle.get()
        try:
            worker = worker or Worker(package)
            return Compiled(uses, worker.compile(places[0]))
        except WorkerError as error:
            worker = None
            return Compiled(uses, None, str(error))
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(jobs) as threads:
        futures = [threads.submit(compile_one, places) for places in chosen.values()]
        for done, future in enumerate(as_completed(futures), start=1):
            progress.show(done, len(futures), future.result().name)
    for _ in range(jobs):
        if worker := idle.get():
            worker.close()
    launched = [] if only else contents["launched"]
    return Gate(contents["triton"], [future.result() for future in futures], launched)


def main(arguments: list[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Run the gate; 0 if nothing offends, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gate.aot", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the line of JSON alone")
    parser.add_argument("--only", default="", metavar="NAME", help="kernels whose name holds NAME")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--package", default="kernels", help="where the *_triton modules lie")
    chosen = parser.parse_args(arguments)
    begun = clock()
    try:
        gate = compile_all(
            chosen.package, chosen.only, max(1, chosen.jobs), Progress(quiet=chosen.json)
        )
    except WorkerError as error:
        print(f"error: the kernels cannot be listed:\n{error}", file=sys.stderr)
        return 1
    offenders = gate.offenders() or ([] if gate.compiled else ["nothing was compiled"])
    if not chosen.json:
        print_report(gate.compiled)
    for offender in offenders:
        print(f"error: {offender}", file=sys.stderr)
    print(json.dumps({**gate.summary(), "seconds": round(clock() - begun, 1)}))
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main())
