from pathlib import Path

import pytest

from edge.config import EdgeConfig
from ledger.errors import ConfigError
from ledger.frame import MAX_CALL_BODY_BYTES
from ledger.settings import parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("edge.example:1", ("edge.example", 1)),
        ("[::1]:0", ("::1", 0)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "8080", ":8080", "host", "host:", "host:http", "host:65536", "::1:80", "[::1]", "[a]:1"],
)
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


def test_several_addresses_are_a_list_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text('[edge]\nhttp = ["127.0.0.1:1", "[::1]:1"]\n')
    assert EdgeConfig.load(file).http == ("127.0.0.1:1", "[::1]:1")


def test_several_addresses_are_split_at_commas_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAILRACE_EDGE_HTTP", "127.0.0.1:1, [::1]:1")
    assert EdgeConfig.load().http == ("127.0.0.1:1", "[::1]:1")


def test_what_pages_of_other_origins_may_do_is_as_it_is_written_or_else_by_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EdgeConfig.load()
    assert (config.stream_origins, config.generate_origins) == (("*",), ())
    for written, meant in (("https://a,https://b", ("https://a", "https://b")), ("", ())):
        monkeypatch.setenv("TAILRACE_EDGE_ALLOWED_ORIGINS", written)
        config = EdgeConfig.load()
        assert config.stream_origins == config.generate_origins == meant


def test_a_flag_is_split_like_the_environment() -> None:
    assert EdgeConfig.load(https="a:1,b:2").https == ("a:1", "b:2")


def test_a_bad_address_names_the_key_and_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match=r"edge\.origin\.0: .*HOST:PORT"):
        EdgeConfig.load(origin="nowhere")


def test_an_unknown_key_is_refused_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text('[edge]\nhtpp = "127.0.0.1:1"\n')
    with pytest.raises(ConfigError, match=r"edge\.htpp: unknown.*tailrace\.toml"):
        EdgeConfig.load(file)


def test_a_body_fits_the_frame_that_takes_it_to_the_origin() -> None:
    assert EdgeConfig.load(max_body_bytes=MAX_CALL_BODY_BYTES).max_body_bytes > 16_000_000
    with pytest.raises(ConfigError, match=r"edge\.max_body_bytes"):
        EdgeConfig.load(max_body_bytes=MAX_CALL_BODY_BYTES + 1)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="together"):
        EdgeConfig.load(certificate=Path("a.crt"))


def test_an_edge_that_would_listen_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="http address"):
        EdgeConfig.load(http="")


def test_several_origins_are_a_list_or_split_at_commas(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text('[edge]\norigin = ["a:1", "[::1]:2"]\n')
    assert EdgeConfig.load(file).origin_addresses == (("a", 1), ("::1", 2))
    assert EdgeConfig.load(origin="a:1, b:2").origin_addresses == (("a", 1), ("b", 2))


def test_an_edge_without_an_origin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"edge\.origin: "):
        EdgeConfig.load(origin="")
