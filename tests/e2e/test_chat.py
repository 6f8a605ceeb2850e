"""`tailrace chat` as a process against two edges."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import NamedTuple

import pytest

from tests.e2e.conftest import House

pytestmark = pytest.mark.anyio


class Answer(NamedTuple):
    """Exit status and output of `tailrace chat`."""

    code: int
    stdout: str
    stderr: str


async def chat(house: House, *arguments: str) -> Answer:
    edges = [part for edge in house.edges for part in ("--edge", edge.url)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tailrace.cli", "chat", "Once upon a time", "--seed", "3", *edges),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Answer(process.returncode, stdout.decode(), stderr.decode())


async def test_a_cut_answer_has_the_same_text_and_shows_where_it_went_on(
    standing_house: House,
) -> None:
    whole = await chat(standing_house, "--raw-prompt", "--max-tokens", "30")
    cut = await chat(standing_house, "--raw-prompt", "--max-tokens", "30", "--cut-after", "12")
    assert (whole.code, cut.code) == (0, 0)
    assert whole.stdout == cut.stdout
    marker = f"⟨cut after 12 tokens · resumed on {standing_house.edges[1].url}, from index 12⟩"
    assert cut.stderr.splitlines()[0] == marker
    assert "⟨" not in whole.stderr
    summary = r"30 tokens · TTFT \d+ ms · \d+ tok/s · 1 resume · length"
    assert re.fullmatch(summary, cut.stderr.splitlines()[-1])


async def test_json_is_one_document_with_the_same_text(standing_house: House) -> None:
    plain = await chat(standing_house, "--max-tokens", "20")
    document = await chat(standing_house, "--max-tokens", "20", "--json")
    said = json.loads(document.stdout)
    assert said["text"] + "\n" == plain.stdout
    assert said["resumes"] == 0
    assert re.fullmatch("[0-9a-f]{32}", said["id"])
    assert document.stderr == ""


async def test_a_stop_sequence_ends_the_answer_and_is_no_error(standing_house: House) -> None:
    asked = ("--raw-prompt", "--max-tokens", "30")
    text = (await chat(standing_house, *asked)).stdout
    stop = text[20:25]
    stopped = await chat(standing_house, *asked, "--stop", stop)
    assert (stopped.code, stopped.stdout) == (0, text[: text.index(stop)] + "\n")
    [summary] = stopped.stderr.splitlines()
    assert summary.endswith(" · stop")
    document = json.loads((await chat(standing_house, *asked, "--stop", stop, "--json")).stdout)
    assert (document["finish_reason"], document["message"]) == ("stop", stop)


async def test_a_request_that_the_origin_refuses_is_wrong_usage(standing_house: House) -> None:
    for flag, value in (("--temperature", "9"), ("--max-tokens", "0"), ("--model", "gpt")):
        answer = await chat(standing_house, flag, value)
        assert (answer.code, answer.stdout) == (2, "")
        assert answer.stderr.startswith("error: ")
        assert flag.removeprefix("--").replace("-", "_") in answer.stderr
