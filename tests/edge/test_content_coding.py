"""The choice of a content coding from Accept-Encoding (RFC 9110, 12.5.3)."""

from __future__ import annotations

import pytest

from tailrace.edge.content_coding import StreamCoding, coding_weights, stream_coding
from tailrace.ledger.errors import CallerError

NEVER, REPLAYS, ALWAYS = StreamCoding.NEVER, StreamCoding.REPLAYS, StreamCoding.ALWAYS


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ([], NEVER),
        ([""], NEVER),
        (["gzip, deflate, br"], NEVER),
        (["identity"], NEVER),
        (["zstd;q=0"], NEVER),
        (["zstd; q=0.000, *"], NEVER),
        (["zst"], NEVER),
        (["zstd;q=2"], NEVER),  # malformed, and so ignored
        (["gzip, deflate, br, zstd"], REPLAYS),
        (["gzip", "zstd"], REPLAYS),
        (["ZSTD ; Q=0.5"], REPLAYS),
        (["*"], REPLAYS),
        (["zstd;q=0.5, identity;q=0.5"], REPLAYS),
        (["zstd;q=0.4, identity;q=0.5"], NEVER),
        (["zstd;q=0.001, *;q=1"], REPLAYS),
        (["zstd, identity;q=0"], ALWAYS),
        (["zstd, *;q=0"], ALWAYS),
        (["zstd, identity;q=0.1, *;q=0"], REPLAYS),
        (["identity;q=0, *"], ALWAYS),
    ],
)
def test_when_a_stream_is_compressed(accepted: list[str], coding: StreamCoding) -> None:
    assert stream_coding(accepted) is coding


@pytest.mark.parametrize(
    "accepted", ["identity;q=0", "*;q=0", "br, identity;q=0", "zstd;q=0, *;q=0"]
)
def test_a_client_that_refuses_both_is_refused(accepted: str) -> None:
    with pytest.raises(CallerError) as refused:
        stream_coding([accepted])
    error = refused.value
    assert (error.code, error.status, error.field) == ("not_acceptable", 406, "Accept-Encoding")
    assert accepted in error.message


def test_members_that_are_malformed_have_no_weight() -> None:
    told = ["gzip;q=0.8, br;q=x, zstd;level=3", ";q=1,,  deflate "]
    assert coding_weights(told) == {"gzip": 0.8, "deflate": 1.0}
