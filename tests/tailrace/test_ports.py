from __future__ import annotations

import socket

import pytest

from ledger.errors import ConfigError
from tailrace.up import HOST, claim_port


def test_a_free_port_is_claimed_as_it_is() -> None:
    free = claim_port(0, "--http-port")
    assert claim_port(free, "--http-port") == free


def test_a_port_in_use_is_named_with_the_flag_that_chooses_another() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            claim_port(port, "--link-port")
    assert str(caught.value).startswith(f"--link-port: port {port} is in use")
    assert f"--link-port {port + 1}" in str(caught.value) or port == 65_535


def test_a_port_that_only_udp_uses_is_in_use_for_quic_alone() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        assert claim_port(port, "--http-port") == port
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            claim_port(port, "--https-port", quic=True)
