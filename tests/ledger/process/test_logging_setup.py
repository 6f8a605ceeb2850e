"""Log output of a process, to a terminal and to a pipe."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

# Python 3.13 shows the source of `-c` in tracebacks, so the secret is not in the source.
FAILS = """
import logging
import structlog
from tailrace.ledger.process.logging_setup import configure_logging

def answer(prompt):
    raise RuntimeError("broken")

configure_logging("info")
for log in (structlog.get_logger("ours"), logging.getLogger("of a library")):
    try:
        answer("a " + "sec" + "ret")
    except RuntimeError:
        log.exception("went wrong")
"""


def on_a_terminal(code: str) -> str:
    """Return what Python says there while it runs `code`."""
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        child = subprocess.Popen([sys.executable, "-c", code], stderr=theirs)
        os.close(theirs)
        said = bytearray()
        with suppress(OSError):  # Linux reports a closed other end like this
            while data := terminal.read(65_536):
                said += data
        child.wait()
    return said.decode()


def in_a_pipe(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stderr


@pytest.mark.parametrize("run", [on_a_terminal, in_a_pipe])
def test_a_traceback_shows_where_and_not_with_what(run: Callable[[str], str]) -> None:
    said = run(FAILS)
    assert said.count("RuntimeError: broken") == 2
    assert "secret" not in said


TWO_TASKS = """
import asyncio, logging
import structlog
from tailrace.ledger.process.logging_setup import configure_logging
from structlog.contextvars import bind_contextvars

async def request(name):
    bind_contextvars(request_id=name)
    await asyncio.sleep(0)
    structlog.get_logger("ours").info("ours")
    logging.getLogger("theirs").warning("theirs")

async def both():
    await asyncio.gather(request("a"), request("b"))

configure_logging("info")
asyncio.run(both())
"""


def test_every_line_of_a_task_says_which_request_it_is_about() -> None:
    told = [json.loads(line) for line in in_a_pipe(TWO_TASKS).splitlines()]
    assert [(line["message"], line["request_id"]) for line in told] == [
        *(("ours", "a"), ("theirs", "a"), ("ours", "b"), ("theirs", "b"))
    ]
