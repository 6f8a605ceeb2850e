"""A chat template in a child process, which may be ended at any moment: only that render fails.

What is asked and answered is said in `template_child`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from origin.checkpoint.template_child import MAX_CPU_S, Answer

COMMAND = (sys.executable, "-P", "-m", "origin.checkpoint.template_child")
PATIENCE_S = 30.0
"""Of a clock, for a start or an answer on a machine that has no processor to spare."""
READ_BYTES = 1 << 16


class TemplateProcess:
    """Asks a child that is started for the first question, and anew after one has ended.

    Any thread may ask, and waits until it is its turn, and for the answer.
    """

    def __init__(self, template: str, special: Mapping[str, Any]) -> None:
        self._first = {"template": template, "special": dict(special)}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def compile(self) -> Answer:
        """Empty, or with a `problem`."""
        with self._lock:
            return self._start()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, now: str
    ) -> Answer:
        """With `text`, `refused` or `failed`."""
        with self._lock:
            if self._child is None and (problem := self._start().get("problem")):
                return {"failed": problem}
            return self._ask({"messages": messages, "tools": tools, "now": now}, "failed")

    def _start(self) -> Answer:
        self._child = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
        )
        self._end = weakref.finalize(self, _end, self._child)
        answer = self._ask(self._first, "problem")
        if answer:
            self._stop()
        return answer

    def _ask(self, question: Mapping[str, Any], otherwise: str) -> Answer:
        """The answer, or why there is none, as what it is `otherwise`."""
        assert self._child is not None
        try:
            return _exchange(self._child, json.dumps(question).encode())
        except TimeoutError:
            reason = f"it gave no answer for {PATIENCE_S:g} s"
        except (BrokenPipeError, EOFError):
            status = self._child.wait()
            reason = f"its process ended with {status}"
            if status == -signal.SIGPROF:
                reason = f"it takes more than {MAX_CPU_S:g} s of processor time"
        self._stop()
        return {otherwise: reason}

    def _stop(self) -> None:
        self._end()
        self._child = None


def _exchange(child: subprocess.Popen[bytes], question: bytes) -> Answer:
    """Raises BrokenPipeError or EOFError for a child that ends, TimeoutError for a silent one."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(question + b"\n")
    child.stdin.flush()
    ready = select.poll()  # select() knows no descriptor above 1023
    ready.register(child.stdout, select.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    pieces = [b""]
    while not pieces[-1].endswith(b"\n"):
        if not ready.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError
        pieces.append(os.read(child.stdout.fileno(), READ_BYTES))
        if not pieces[-1]:
            raise EOFError
    answer: Answer = json.loads(b"".join(pieces))
    return answer


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with suppress(BrokenPipeError), child:  # closes its pipes, and waits for it
        pass


def _environment() -> dict[str, str]:
    """It finds this package where its parent did."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
