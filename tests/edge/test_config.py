"""Settings of an edge."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.edge.access.connections import RESERVED_FILES
from tailrace.edge.config import EdgeConfig, connection_limits, too_few_files
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.frame import MAX_CALL_BODY_BYTES
from tailrace.ledger.links.transport import LinkAddress
from tailrace.ledger.process.settings import parse_address


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


def test_origins_of_pages_are_as_browsers_spell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EdgeConfig.load().allowed_origins == ()
    monkeypatch.setenv("TAILRACE_EDGE_ALLOWED_ORIGINS", "https://A.example,http://b:81,*,null")
    written = EdgeConfig.load().allowed_origins
    assert written == ("https://a.example", "http://b:81", "*", "null")
    for wrong in ("a.example", "https://a.example/", "https://a.example/page", "https://"):
        with pytest.raises(
            ConfigError, match=r'edge\.allowed_origins\[0\]: ".*" is not valid \(write an origin'
        ):
            EdgeConfig.load(allowed_origins=wrong)


def test_a_trusted_proxy_is_an_address_or_a_network() -> None:
    config = EdgeConfig.load(trusted_proxies="10.0.0.0/8, 2001:db8::1")
    assert config.proxies.trusts("10.1.2.3") and config.proxies.trusts("2001:db8::1")
    with pytest.raises(
        ConfigError, match=r'edge\.trusted_proxies\[0\]: "nginx" is not valid \(write an address'
    ):
        EdgeConfig.load(trusted_proxies="nginx")


@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        ({}, True),
        ({"http": "localhost:80,[::1]:80,127.9.9.9:1"}, True),
        ({"http": "127.0.0.1:80,0.0.0.0:81"}, False),
        ({"http": "[::]:80"}, False),
        ({"http": "10.0.0.1:80"}, False),
        ({"http": "edge.example:80"}, False),
        ({"https": "0.0.0.0:443", "certificate": Path("a"), "key": Path("b")}, False),
    ],
)
def test_whether_an_edge_can_only_be_reached_from_its_machine(
    settings: dict[str, Any], alone: bool
) -> None:
    assert EdgeConfig.load(**settings).listens_on_loopback_alone is alone


def test_connections_are_bounded_by_the_files_that_may_be_open() -> None:
    config = EdgeConfig.load(max_connections=500)
    assert connection_limits(config, open_files=1 << 20).most == 500
    assert connection_limits(config, open_files=RESERVED_FILES + 100).most == 100
    assert connection_limits(config, open_files=10).most == 1


def test_files_are_too_few_for_the_connections_that_were_configured() -> None:
    files = RESERVED_FILES + 15_000
    assert not too_few_files(EdgeConfig.load(), files)
    assert too_few_files(EdgeConfig.load(), RESERVED_FILES + 9_999)
    assert too_few_files(EdgeConfig.load(max_connections=20_000), files)
    assert not too_few_files(EdgeConfig.load(max_connections=15_000), files)


def test_a_flag_is_split_like_the_environment() -> None:
    assert EdgeConfig.load(http="a:1,b:2").http == ("a:1", "b:2")


def test_a_bad_address_names_the_key_and_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match=r"edge\.origin\[0\]: .*HOST:PORT"):
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


@pytest.mark.parametrize("given", ["0.0.0.0:443", ["127.0.0.1:8443", "[::1]:8443"]])
def test_https_without_a_certificate_is_refused(given: object) -> None:
    """Served would be HTTP alone, while the operator believes that there is TLS."""
    with pytest.raises(ConfigError, match=r"443 cannot be served without a certificate; give") as e:
        EdgeConfig.load(https=given)
    assert "edge.certificate and edge.key" in str(e.value)
    assert EdgeConfig.load(https=[]).https == ()


@pytest.mark.parametrize("others", [{"http": "0.0.0.0:80"}, {"trusted_proxies": "127.0.0.1"}])
def test_operators_without_a_key_are_only_had_on_a_private_edge(others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="operator_without_key: others can reach this edge"):
        EdgeConfig.load(operator_without_key=True, **others)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="together"):
        EdgeConfig.load(certificate=Path("a.crt"))


def test_an_edge_that_would_listen_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="http address"):
        EdgeConfig.load(http="")


def test_several_origins_are_a_list_or_split_at_commas(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text('[edge]\norigin = ["a:1", "[::1]:2"]\n')
    assert EdgeConfig.load(file).origin_addresses == (LinkAddress("a", 1), LinkAddress("::1", 2))
    assert EdgeConfig.load(origin="a:1, b:2").origin_addresses == (
        LinkAddress("a", 1),
        LinkAddress("b", 2),
    )


def test_an_edge_without_an_origin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"edge\.origin: "):
        EdgeConfig.load(origin="")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"origin": "quic://a:1"}, "write HOST:PORT, tls://HOST:PORT or unix:///PATH"),
        ({"origin": "unix://relative"}, "write HOST:PORT"),
        ({"origin_ca": "ca.pem"}, "need origin = tls://HOST:PORT"),
        ({"origin": "tls://a:1", "origin_certificate": "a.pem"}, "given together"),
        ({"origin_secret": "short"}, "at least 16 characters"),
    ],
)
def test_settings_of_the_links_that_do_not_go_together_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        EdgeConfig.load(**settings)
    assert "'short'" not in str(caught.value)
