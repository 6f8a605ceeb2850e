"""Addresses of links, and what the two sides show each other."""

from pathlib import Path

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.links.transport import Credentials, LinkAddress


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8470", LinkAddress("127.0.0.1", 8470)),
        ("[::1]:8470", LinkAddress("::1", 8470)),
        ("tls://origin.example:8470", LinkAddress("origin.example", 8470, "tls")),
        ("tls://[::1]:1", LinkAddress("::1", 1, "tls")),
        ("unix:///run/tailrace.sock", LinkAddress("/run/tailrace.sock", 0, "unix")),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: LinkAddress) -> None:
    assert LinkAddress.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "host", "unix://", "unix:///", "unix://a/b", "tls://", "tls://host", "http://a:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        LinkAddress.parse(text)


def test_a_file_that_cannot_be_used_is_named_with_its_setting(tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    for credentials, field in (
        (Credentials("edge.origin", ca=missing), "edge.origin_ca"),
        (Credentials("origin.link", certificate=missing, key=missing), "origin.link_certificate"),
    ):
        with pytest.raises(ConfigError) as caught:
            credentials.connects()
        assert caught.value.field == field
        assert str(missing) in caught.value.message
