"""Claiming the ports that the command line names."""

from __future__ import annotations

import socket

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.up import HOST, claim_port
from tests.e2e.processes import free_port

# Ports that the kernel chooses may be in use by a connection at any moment.


def test_a_free_port_is_claimed_as_it_is() -> None:
    assert claim_port(0, "--http-port") > 0
    free = free_port()
    assert claim_port(free, "--http-port") == free


def test_a_port_in_use_is_named_with_the_flag_that_chooses_another() -> None:
    port = free_port()
    with socket.create_server((HOST, port)), pytest.raises(ConfigError) as caught:
        claim_port(port, "--link-port")
    assert str(caught.value).startswith(f"--link-port: port {port} is in use")
    assert f"--link-port {port + 1}" in str(caught.value)


def test_a_port_that_only_udp_uses_is_in_use_for_quic_alone() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        port = free_port()
        taken.bind((HOST, port))
        assert claim_port(port, "--http-port") == port
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            claim_port(port, "--https-port", quic=True)
