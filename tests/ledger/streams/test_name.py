import pytest

from ledger.errors import NotFound
from ledger.streams.name import check_name, generation_id, named_by


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
