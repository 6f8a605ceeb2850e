"""Parsing of requests to streams."""

import pytest

from tailrace.ledger.errors import CallerError, NotFound, TooLarge
from tailrace.ledger.objects.object import Headers, ObjectRequest
from tailrace.origin.streams.config import Create, ForkOrder
from tailrace.origin.streams.expiry import Expiry
from tailrace.origin.streams.offsets import START, Offset
from tailrace.origin.streams.request import (
    AppendRequest,
    Live,
    Place,
    Read,
    Sender,
    parse_append,
    parse_create,
    parse_read,
)

LIMIT = 10


def request(body: bytes = b"", query: str = "", **headers: str) -> ObjectRequest:
    fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return ObjectRequest("?", f"http://host/v1/stream/x{query}", fields, body)


def test_a_plain_put_asks_for_nothing() -> None:
    assert parse_create(request(), LIMIT) == Create()


def test_a_put_says_what_the_stream_is_to_be() -> None:
    asked = parse_create(
        request(
            content_type="text/plain",
            stream_ttl="60",
            stream_closed="TRUE",
            stream_forked_from="/v1/stream/a/b",
            stream_fork_offset="0000000000000003_0000000000000000",
            stream_fork_sub_offset="2",
        ),
        LIMIT,
    )
    assert asked == Create(
        "text/plain", Expiry(ttl_s=60), closed=True, fork=ForkOrder("a/b", Offset(3), 2)
    )


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("stream-fork-offset", "now"),),
        (("stream-fork-sub-offset", "0"),),
    ],
)
def test_a_fork_at_the_end_names_no_offset(headers: Headers) -> None:
    headers = (("stream-forked-from", "/v1/stream/a"), *headers)
    asked = parse_create(ObjectRequest("PUT", "http://host/v1/stream/x", headers), LIMIT)
    assert asked.fork == ForkOrder("a")


@pytest.mark.parametrize("name", ["stream-fork-offset", "stream-fork-sub-offset"])
def test_a_place_to_fork_at_needs_a_source(name: str) -> None:
    with pytest.raises(CallerError) as refused:
        parse_create(ObjectRequest("PUT", "http://host/v1/stream/x", ((name, "0"),)), LIMIT)
    assert refused.value.status == 400


@pytest.mark.parametrize("bad", ["-1", "abc", "1.5", "05", "+1", "", "9" * 17])
def test_a_sub_offset_is_a_count(bad: str) -> None:
    with pytest.raises(CallerError):
        parse_create(request(stream_forked_from="/v1/stream/a", stream_fork_sub_offset=bad), LIMIT)


def test_a_source_that_can_be_no_stream_is_not_found() -> None:
    with pytest.raises(NotFound):
        parse_create(request(stream_forked_from="/v1/stream/../etc"), LIMIT)


def test_a_body_over_the_limit_is_refused() -> None:
    for parse in (parse_create, parse_append):
        parse(request(b"x" * LIMIT, content_type="text/plain"), LIMIT)
        with pytest.raises(TooLarge) as refused:
            parse(request(b"x" * (LIMIT + 1), content_type="text/plain"), LIMIT)
        assert refused.value.status == 413


def test_a_post_says_who_appends_what() -> None:
    append = parse_append(
        request(
            b"data",
            content_type="text/plain",
            stream_seq="007",
            stream_closed="true",
            producer_id="p",
            producer_epoch="1",
            producer_seq="2",
        ),
        LIMIT,
    )
    assert append == AppendRequest(b"data", "text/plain", True, "007", Sender("p", Place(1, 2)))


def test_a_post_without_a_body_can_only_close() -> None:
    closing = request(content_type="no type at all", stream_closed="True")
    assert parse_append(closing, LIMIT) == AppendRequest(b"", None, True, None, None)
    for other in ("false", "yes", "1", ""):
        with pytest.raises(CallerError):
            parse_append(request(content_type="text/plain", stream_closed=other), LIMIT)


def test_what_is_appended_has_a_content_type() -> None:
    with pytest.raises(CallerError) as refused:
        parse_append(request(b"data"), LIMIT)
    assert refused.value.field == "content-type"


def test_a_sequence_is_neither_empty_nor_endless() -> None:
    for seq in ("", "x" * 1025):
        with pytest.raises(CallerError):
            parse_append(request(b"data", content_type="text/plain", stream_seq=seq), LIMIT)


def test_a_get_reads_all_unless_it_says_from_where() -> None:
    assert parse_read(request()) == Read(START)
    assert parse_read(request(query="?offset=now")) == Read(None)
    there = parse_read(request(query="?offset=0000000000000003_0000000000000001"))
    assert there == Read(Offset(3, 1))


def test_a_live_get_says_how_it_waits_and_what_it_has() -> None:
    read = parse_read(request(query="?cursor=5&live=sse&offset=-1&foo=bar", if_none_match='"x"'))
    assert read == Read(START, Live.SSE, 5, '"x"')


@pytest.mark.parametrize(
    "query",
    [
        "?offset=",
        "?offset=a&offset=b",
        "?offset=-1&offset=-1",
        "?offset=0,1",
        "?offset=0%201",
        "?offset=%00",
        "?live=sse",
        "?live=long-poll",
        "?live=frames",
        "?offset=-1&live=",
        "?offset=-1&live=poll",
        "?offset=-1&live=sse&live=sse",
        "?" + "&".join("x=1" for _ in range(100)),
    ],
)
def test_a_query_that_says_nothing_or_two_things_is_refused(query: str) -> None:
    with pytest.raises(CallerError) as refused:
        parse_read(request(query=query))
    assert refused.value.status == 400
