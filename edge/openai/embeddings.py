"""`/v1/embeddings`: returns the vector of each text; the edge opens one stream for each text."""

from __future__ import annotations

import asyncio
import struct
from base64 import b64encode
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.generate.encoders import HEADERS, SCHEMA_ID
from tailrace.edge.generate.params import read_body
from tailrace.edge.generate.routes import Collected, collect
from tailrace.edge.generate.schema import Settings
from tailrace.edge.openai.chunks import (
    check_end,
)
from tailrace.edge.openai.completions import key_of
from tailrace.edge.openai.request import TEXTS, OpenAiBody, open_of, parse_body, read_texts
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import Reader
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Caller, Open, Opened, StreamEnd
from tailrace.ledger.process.tasks import gather

EXAMPLE = '{"model": "demo", "input": "Once upon a time"}'
MAX_INPUTS = 2048
"""Maximum number of texts of a request, the same as OpenAI's."""
AT_A_TIME = 8
"""Maximum number of streams that one request has open at a time. Further texts wait, to leave
capacity for other requests."""


class EmbeddingBody(OpenAiBody):
    """The JSON body of a request."""

    model_config = ConfigDict(extra="ignore", strict=True)
    cannot: ClassVar = {"dimensions": ()}

    model: str = Field(min_length=1, description='a model, such as "demo"')
    input: Any = Field(description="a string or a list of strings", json_schema_extra=TEXTS)
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description='"float" or "base64"'
    )
    priority: str | None = Field(None, description="a string")

    def opens(self, key: str | None, caller: Caller | None) -> list[Open]:
        """Return an Open for each text; raise CallerError for an invalid request."""
        settings = Settings.model_validate({"model": self.model, "priority": self.priority})
        texts = read_texts("input", self.input, MAX_INPUTS, "texts")
        if "" in texts:
            raise CallerError("an empty text has no embedding", field=f"input[{texts.index('')}]")
        return [
            open_of(settings, key_of(key, nth), caller, prompt=text, max_tokens=1)
            for nth, text in enumerate(texts)
        ]


async def embed(request: Request) -> Response:
    """Handle POST /v1/embeddings."""
    body = await read_body(request)
    parsed, headers = parse_body(EmbeddingBody, body, EXAMPLE)
    opens = parsed.opens(request.headers.get("Idempotency-Key"), caller_of(request))
    link, turns = link_of(request), asyncio.Semaphore(AT_A_TIME)
    work = gather(*(_computed(link, wanted, turns) for wanted in opens))
    found = await unless_disconnected(request, work)
    vectors: list[Any] = [vector for _, vector, _ in found]
    if parsed.encoding_format == "base64":  # the numbers are packed as fp32, little-endian
        packed = (struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)
        vectors = [b64encode(data).decode() for data in packed]
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(tokens for *_, tokens in found)
    document = {
        "object": "list",
        "data": data,
        "model": found[0][0].model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    headers |= HEADERS | {
        "Tailrace-Stream": found[0][0].stream.hex(),
        "Tailrace-Schema": SCHEMA_ID,
    }
    return JSONResponse(document, headers=headers)


async def _computed(
    link: OriginPool, wanted: Open, turns: asyncio.Semaphore
) -> tuple[Opened, list[float], int]:
    """Run one stream; return its Opened frame, its vector, and the number of tokens of its text."""
    async with turns:
        with Reader(link) as reader:
            opened = await reader.open(wanted)
            collected = await collect(reader)
    end = collected.closing
    assert isinstance(end, StreamEnd)
    tokens = check_end(end).prompt_tokens  # raises the error of a failed stream
    return opened, _vector(collected), tokens


def _vector(collected: Collected) -> list[float]:
    if collected.embeddings:
        return list(collected.embeddings[0].values)
    if collected.data:  # a vector that is too long for one frame arrives as binary data
        packed = b"".join(collected.data)
        return list(struct.unpack(f"<{len(packed) // 4}f", packed))
    raise CallerError("The model does not make embeddings.", code="unsupported", field="model")
