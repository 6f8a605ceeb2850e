"""Checkpoints of every family, served as a folder: a worker's death changes no token."""

import asyncio
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest

from tailrace.kernels.shapes import Family
from tailrace.ledger.frame import Token, decode
from tailrace.origin.checkpoint.tokenizer_file import load_tokenizer
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models.cpu_model import load
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import SSE, Reading, events
from tests.origin.engine.runs import engine_of, make_run, run_all
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

pytestmark = pytest.mark.anyio

PROMPT = "The fox ran"
TOKENS = 150
SHAPES = {
    Family.LLAMA: Shape(family=Family.LLAMA, heads=6, head_dim=16, tied_head=False, shards=2),
    Family.QWEN3: Shape(family=Family.QWEN3, heads=3, kv_heads=1, head_dim=32),
}
CASES = {
    **{family.value: (shape, AS_STORED) for family, shape in SHAPES.items()},
    "quantised": (
        Shape(family=Family.LLAMA, hidden=128, ffn=128),
        Formats("int4", "int8", "int8"),
    ),
}


def text_in_process(folder: Path, formats: Formats) -> str:
    """Return what the engine makes of the request, without a process, a socket or a ledger."""
    tokenizer = load_tokenizer(folder)
    ids = tuple(tokenizer.encode(PROMPT).ids)
    run = make_run(prompt_ids=ids, max_tokens=TOKENS, temperature=1.0, seed=3, ignore_eos=True)
    emissions = run_all(engine_of(load(folder, formats=formats), tokenizer), {1: run})[1]
    frames = [decode(emission.frame)[1] for emission in emissions]
    return "".join(frame.text for frame in frames if isinstance(frame, Token))


@pytest.mark.parametrize("case", CASES)
async def test_a_folder_is_served_under_its_name_and_survives_its_worker(
    tmp_path: Path, client: httpx.AsyncClient, case: str
) -> None:
    shape, formats = CASES[case]
    folder = write_checkpoint(tmp_path / f"tiny-{case}", shape)
    flags = {name.replace("_", "-"): value for name, value in asdict(formats).items()}
    origin = Origin(tmp_path / "data", model=folder, **flags)
    edge = Edge(origin)
    body = {"model": folder.name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0}
    body |= {"seed": 3, "ignore_eos": True}
    reading, killing = Reading(), list[asyncio.Task[None]]()
    async with running(origin, edge):
        url = f"{edge.url}/v1/generate"
        async with client.stream("POST", url, json=body, headers=SSE) as response:
            async for event in events(response):
                reading.events.append(event)
                if len(reading.events) == 2:
                    told = (await client.get(f"{edge.url}/readyz")).json()["devices"]
                if len(reading.events) == 5:
                    killing.append(asyncio.create_task(origin.kill_worker()))
        await killing[0]
    ready = [event for event in origin.events if event.get("message") == "worker.ready"]
    assert {event["device"] for event in ready} == {*told} == {formats.on("cpu torch")}
    assert reading.text == text_in_process(folder, formats)
    assert reading.indexes == list(range(len(reading.events)))
    assert reading.end["total_tokens"] == TOKENS
