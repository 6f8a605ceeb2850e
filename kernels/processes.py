"""A pool of worker processes that answer requests line by line; used to run compilers.

A worker is `python -m MODULE ARGUMENTS`. It first writes a greeting, then one answer for each line
that it reads, each as one line of JSON, until its input ends. A worker therefore ends with the
process that started it. If a worker fails, the end of its standard error becomes the text of a
ProcessError.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from queue import SimpleQueue
from threading import Timer
from typing import Any

ANSWER_SECONDS = 600
"""Timeout in seconds for one answer, and for a worker's imports at its start."""
ERROR_LINES = 12
"""Maximum lines of a failed worker's standard error in an error message."""

Answer = dict[str, Any]


class ProcessError(Exception):
    """A worker process failed; the text is the end of its standard error."""


class Processes:
    """A pool of `jobs` worker processes, all started at once; a dead one is replaced.

    `greeting` is what the first worker has written at its start. Raises ProcessError if that worker
    cannot start.
    """

    def __init__(self, jobs: int, *command: str) -> None:
        self._command = command
        self._jobs = jobs
        processes = [_Process(command) for _ in range(jobs)]
        self._idle: SimpleQueue[_Process | None] = SimpleQueue()
        for process in processes:
            self._idle.put(process)
        try:
            self.greeting = processes[0].greeting
        except ProcessError:
            self.close()
            raise

    def answers(self, lines: Sequence[str]) -> Iterator[tuple[int, Answer | ProcessError]]:
        """Send each line to an idle worker; yield (index of the line, its answer or error).

        The pairs come in the order in which the workers finish, not in the order of `lines`.
        """
        with ThreadPoolExecutor(self._jobs) as threads:
            places = {threads.submit(self._ask, line): at for at, line in enumerate(lines)}
            for future in as_completed(places):
                yield places[future], future.result()

    def close(self) -> None:
        """End all workers. Must not be called while `answers` waits for an answer."""
        for _ in range(self._jobs):
            if process := self._idle.get():
                process.close()

    def _ask(self, line: str) -> Answer | ProcessError:
        process = self._idle.get()
        try:
            process = process or _Process(self._command)
            return process.ask(line)
        except ProcessError as error:
            process = None
            return error
        finally:
            self._idle.put(process)


class _Process:
    def __init__(self, command: Sequence[str]) -> None:
        # A file, not a pipe: nothing reads standard error while the process runs, so a pipe could
        # fill up.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        safe = ["-P"] if sys.flags.safe_path else []
        self._process = subprocess.Popen(
            [sys.executable, *safe, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )

    @cached_property
    def greeting(self) -> Answer:
        """The worker's first line, written when it has imported everything."""
        return self._answer()

    def ask(self, line: str) -> Answer:
        assert self._process.stdin is not None
        _ = self.greeting  # A worker started anew writes its greeting first; skip it.
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise ProcessError(self._last_words()) from None
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        alarm = Timer(ANSWER_SECONDS, self._process.kill)
        alarm.start()
        line = self._process.stdout.readline()
        alarm.cancel()
        if not line.endswith("\n"):
            raise ProcessError(self._last_words())
        answer: Answer = json.loads(line)
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").splitlines()
        self.close()
        return "\n".join(lines[-ERROR_LINES:]) or f"no answer, exit status {code}"
