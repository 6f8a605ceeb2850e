import pytest

from ledger.errors import CallerError
from ledger.streams.content import essence, is_json, is_text, parse_type


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
