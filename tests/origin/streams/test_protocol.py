"""Names, links and media types of streams."""

import pytest

from tailrace.ledger.errors import CallerError, NotFound
from tailrace.origin.streams.protocol import (
    check_name,
    essence,
    generation_id,
    is_json,
    is_text,
    named_by,
    parse_type,
)


@pytest.mark.parametrize("name", ["a", "a/b/c", "events/pull-1", "ünï/cödé", ".hidden", "a..b"])
def test_segments_of_a_path_are_a_name(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "/", "a//b", "../x", "a/../b", "a/.", "a\x00b", "a\\..\\b", "a\nb", "x" * 513, "a/"],
)
def test_a_name_that_leads_elsewhere_is_none(name: str) -> None:
    with pytest.raises(NotFound):
        check_name(name)


def test_the_protocols_own_resources_are_no_streams() -> None:
    with pytest.raises(NotFound):
        check_name("__ds/subscriptions/x")


@pytest.mark.parametrize("link", ["/v1/stream/a/b", "http://host:1/v1/stream/a/b?offset=-1"])
def test_a_path_or_a_url_names_a_stream(link: str) -> None:
    assert named_by(link) == "a/b"


def test_a_path_is_unquoted_before_it_is_checked() -> None:
    assert named_by("/v1/stream/a%20b") == "a b"
    with pytest.raises(NotFound):
        named_by("/v1/stream/%2e%2e/x")


@pytest.mark.parametrize(
    "link", ["", "a", "/v1/generate/a", "http://[::1/v1/stream/a", "/v1/stream/"]
)
def test_another_link_names_no_stream(link: str) -> None:
    with pytest.raises(NotFound):
        named_by(link)


def test_the_id_of_a_generation_is_32_lower_case_hex_digits() -> None:
    assert generation_id("00" * 16) == bytes(16)
    for other in ("00" * 15, "0G" * 16, "AB" * 16, "x", "00" * 16 + "\n"):
        assert generation_id(other) is None


@pytest.mark.parametrize("text", ["text/plain", "APPLICATION/JSON; charset=utf-8", "image/svg+xml"])
def test_a_media_type_is_kept_as_it_was_written(text: str) -> None:
    assert parse_type(f" {text} ") == text


@pytest.mark.parametrize(
    "text",
    ["text", "text/", "/plain", "text/plain\r\nx: y", "text/pl\xe4in", "a b/c", "a/" + "b" * 300],
)
def test_what_is_no_media_type_is_refused(text: str) -> None:
    with pytest.raises(CallerError):
        parse_type(text)


def test_an_empty_type_is_none() -> None:
    assert parse_type(None) is None
    assert parse_type("") is None


def test_types_are_compared_without_case_and_parameters() -> None:
    assert essence("Text/Plain; charset=UTF-8") == essence("text/plain")


def test_text_and_json_go_as_they_are_into_events() -> None:
    assert is_json("Application/JSON;x=y") and is_text("application/json") and is_text("text/csv")
    assert not is_json("application/jsonl") and not is_text("application/octet-stream")
