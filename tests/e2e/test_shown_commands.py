"""The curl commands of the README and of docs/start.md, run as they stand on the demo model."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import House
from tests.e2e.sse import after_retry
from tests.needs import needs_program
from tests.test_house import ROOT

pytestmark = [pytest.mark.anyio, needs_program("curl", "apt-get install curl")]

SHOWN_URL = "http://127.0.0.1:8080"


def blocks(page: str, first: str) -> list[str]:
    """Return the blocks of code of a page, from the one that has `first` in it."""
    text = (ROOT / page).read_text("utf-8")
    found = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    at = next(i for i, block in enumerate(found) if first in block)
    return found[at:]


async def shown(command: str, house: House, folder: Path) -> str:
    """Run a command that a page shows, at the edge of the test, and return what it prints."""
    command = command.replace(SHOWN_URL, house.edges[0].url)
    done = await asyncio.to_thread(
        subprocess.run, command, shell=True, cwd=folder, capture_output=True, check=True
    )
    text: str = done.stdout.decode()
    return text


def ids(events: str) -> list[int]:
    return [int(found) for found in re.findall(r"^id: (\d+)$", events, re.MULTILINE)]


async def test_the_first_steps_print_what_the_page_shows(
    standing_house: House, tmp_path: Path
) -> None:
    start, answer, resume = blocks("docs/start.md", "-D head")[:3]
    said = await shown(start, standing_house, tmp_path)
    assert after_retry(said).strip() == after_retry(answer).strip()
    rest = await shown(resume, standing_house, tmp_path)
    assert ids(rest) == list(range(2, 2 + len(ids(rest))))
    assert "event: end\n" in rest


async def test_the_commands_of_the_readme_start_a_stream_and_resume_it(
    standing_house: House, tmp_path: Path
) -> None:
    commands = blocks("README.md", "curl -N -i")[0]
    start, resume = re.split(r"^#.*\n", commands, flags=re.MULTILINE)
    whole = await shown(start, standing_house, tmp_path)
    assert whole.startswith("HTTP/1.1 200 ")
    stream = re.search(r"^tailrace-stream: (\S+)", whole, re.MULTILINE | re.IGNORECASE)
    assert stream is not None
    resume = resume.replace("STREAM", stream[1]).replace("curl", "curl -i")
    rest = await shown(resume, standing_house, tmp_path)
    assert rest.startswith("HTTP/1.1 200 ")
    assert ids(rest) == ids(whole)[42:]
    assert whole.endswith(rest[rest.index("id: 42\n") :])
