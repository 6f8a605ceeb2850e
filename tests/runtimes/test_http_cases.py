"""The table of requests and answers, at every door of every runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import curl_cffi
import httpx
import pytest
from curl_cffi import CurlHttpVersion, CurlOpt

from tailrace.ledger.frame import SCHEMA_HASH
from tailrace.ledger.links.rights import ALL_RIGHTS, Right
from tests.e2e.sse import TIMEOUT
from tests.runtimes.cases import Answer, Case, Request, Values, table
from tests.runtimes.runtime import RUNTIMES, Door, Runtime, token_for

pytestmark = pytest.mark.anyio

VERSIONS = {
    "1.1": CurlHttpVersion.V1_1,
    "2": CurlHttpVersion.V2_0,
    "3": CurlHttpVersion.V3ONLY,
}
HOUR_S = 3600.0
GENERATED: dict[str, Any] = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 6,
    "seed": 1,
}


class Visitor:
    """A client that speaks one version of HTTP, and changes nothing in the request."""

    def __init__(self, version: str, door: Door) -> None:
        self._version = version
        self._door = door
        self._session = curl_cffi.Session[Any](curl_options={CurlOpt.PATH_AS_IS: 1})

    def ask(self, request: Request) -> Answer:
        response = self._session.request(
            request.method,  # type: ignore[arg-type]
            self._door.url + request.path,
            headers=dict(request.headers),
            data=request.body,
            http_version=VERSIONS[self._version],
            verify=self._door.certificate is None or str(self._door.certificate),  # type: ignore[arg-type]
            timeout=60,
            allow_redirects=False,
        )
        headers = {name.lower(): value or "" for name, value in response.headers.items()}
        return Answer(response.status_code, headers, response.content)

    def close(self) -> None:
        self._session.close()


@pytest.fixture(scope="module")
async def values(runtime: Runtime) -> Values:
    """Return values for the table's placeholders: a stream that has ended, and tokens for it."""
    taken = {"Idempotency-Key": uuid4().hex}
    async with httpx.AsyncClient(base_url=runtime.url, timeout=TIMEOUT) as client:
        one = await client.post("/v1/generate", json=GENERATED, headers=taken)
        other = await client.post("/v1/generate", json=GENERATED)
        stream = one.headers["Tailrace-Stream"]
        ended = (await client.get(f"/v1/generate/{stream}")).json()
    token: str = one.headers["Tailrace-Token"]
    version, kid, payload, mac = token.split(".")

    def signed(rights: Right, *, expires_in_s: float = HOUR_S) -> str:
        return token_for(runtime.origin, stream, rights, expires_in_s=expires_in_s)

    return {
        "schema": SCHEMA_HASH.hex(),
        "ended": stream,
        "text": ended["text"],
        "last": ended["next_index"] - 1,
        "beyond": ended["next_index"],
        "taken_key": taken["Idempotency-Key"],
        "token": token,
        "other_token": other.headers["Tailrace-Token"],
        "forged_token": f"{version}.{kid}.{payload}.{mac[::-1]}",
        "unknown_key_token": f"{version}.nokey.{payload}.{mac}",
        "version_token": f"v2.{kid}.{payload}.{mac}",
        "cut_token": token[:-1],
        "expired_token": signed(ALL_RIGHTS, expires_in_s=-HOUR_S),
        "reading_token": signed(Right.READ),
        "cancelling_token": signed(Right.CANCEL),
    }


@pytest.fixture(scope="module")
def visitors(runtime: Runtime) -> Iterator[dict[str, Visitor]]:
    made = {version: Visitor(version, door) for version, door in runtime.doors.items()}
    yield made
    for visitor in made.values():
        visitor.close()


ROWS = [
    pytest.param(name, version, case, id=f"{name}, HTTP/{version}: {case.name}")
    for name, runtime in RUNTIMES.items()
    for version in runtime.versions
    for case in table()
    if version in case.versions
]


@pytest.mark.parametrize(
    ("runtime", "version", "case"), ROWS, indirect=["runtime"], scope="session"
)
async def test_a_request_is_answered_as_the_table_says(
    runtime: Runtime, version: str, case: Case, values: Values, visitors: dict[str, Visitor]
) -> None:
    answer = await asyncio.to_thread(visitors[version].ask, case.request(values))
    assert case.faults(answer, values) == []
