"""Stateless resets: for clients of a server that was killed, and of use to nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from aioquic.quic.logger import QuicLogger

from tailrace.edge.quic.aioquic_library import AioquicLibrary
from tailrace.edge.quic.interface import Address, Datagrams
from tailrace.edge.quic.stateless_reset import (
    HIDDEN_RESET_BYTES,
    MAX_RESET_BYTES,
    MIN_TRIGGER_BYTES,
    RESETS_PER_S,
    TOKEN_BYTES,
    StatelessResets,
)
from tailrace.up import CertificateFiles
from tests.edge.quic.net import Net

CID = bytes(range(8))


class Captured:
    """The way to clients; keeps what leaves by it."""

    local: tuple[str, int] | None = None

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Address]] = []

    def send(self, datagrams: Datagrams) -> None:
        self.sent += datagrams


def tokens_of(log: QuicLogger) -> dict[str, bytes]:
    """Return the token of each connection id that a client has got, by the id in hex digits."""
    found: dict[str, bytes] = {}

    def look(node: Any) -> None:
        if isinstance(node, dict) and node.get("name") != "transport:packet_sent":
            if "stateless_reset_token" in node:  # in the transport parameters
                first = node["initial_source_connection_id"]
                found[first] = bytes.fromhex(node["stateless_reset_token"])
            elif "reset_token" in node:  # in a NEW_CONNECTION_ID frame
                found[node["connection_id"]] = bytes.fromhex(node["reset_token"])
            for value in node.values():
                look(value)
        elif isinstance(node, list):
            for value in node:
                look(value)

    look(log.to_dict())
    return found


def short(size: int, cid: bytes = CID) -> bytes:
    """Return a packet that nobody can read."""
    return (b"\x40" + cid).ljust(size, b"x")


@pytest.mark.parametrize("secret", [None, b"of all edges"])
@pytest.mark.parametrize("mark", [None, 7])
def test_another_server_ends_the_connections_of_one_that_is_gone(
    certificate: CertificateFiles, secret: bytes | None, mark: int | None
) -> None:
    files = (certificate.certificate, certificate.key)
    net, next_ = Net(certificate), Net(certificate)
    for each in (net, next_):
        each.server.library = AioquicLibrary(*files, mark, secret=secret)
    log = QuicLogger()
    client = net.client(quic_logger=log)
    net.pass_time(0.5)  # more connection ids come
    tokens = tokens_of(log)
    assert len(tokens) == 8
    for number in range(3):
        client.quic.send_ping(number)
        for datagram, _ in client.quic.datagrams_to_send(net.now):
            way = Captured()
            next_.server.receive(datagram, client.address, way)
            [(reset, to)] = way.sent
            cid = datagram[1:9].hex()
            assert (to, reset[-TOKEN_BYTES:]) == (client.address, tokens[cid])
        client.quic.change_connection_id()
    assert next_.server.count == 0


def test_a_reset_looks_like_any_short_packet_and_is_shorter_than_what_it_answers() -> None:
    resets, seen = StatelessResets(b"secret"), set()
    for size in range(1, 1500):
        answer = resets.answer(short(size), CID, now=float(size))
        assert (answer is not None) == (size >= MIN_TRIGGER_BYTES)
        if answer is not None:
            assert min(HIDDEN_RESET_BYTES, size - 1) <= len(answer) < size
            assert len(answer) <= MAX_RESET_BYTES
            assert answer[0] & 0xC0 == 0x40
            assert answer.endswith(resets.token(CID))
            seen.add((answer[0], len(answer)))
    assert len({first for first, _ in seen}) == 64
    assert {size for _, size in seen} == set(range(MIN_TRIGGER_BYTES - 1, MAX_RESET_BYTES + 1))


@pytest.mark.parametrize("first", [0x00, 0x3F, 0x80, 0xC0, 0xFF])
def test_what_is_no_short_header_gets_no_reset(first: int) -> None:
    assert StatelessResets(b"secret").answer(bytes((first,)) + bytes(99), CID, 0.0) is None


def test_tokens_are_those_of_an_id_and_a_secret() -> None:
    made = {StatelessResets(s).token(c) for s in (b"1", b"2") for c in (CID, CID[::-1])}
    assert len(made) == 4 and {len(each) for each in made} == {TOKEN_BYTES}
    assert StatelessResets(b"1").token(CID) in made


def test_two_servers_do_not_answer_each_other_for_ever(certificate: CertificateFiles) -> None:
    net, datagram, answers = Net(certificate), short(1200), 0
    while True:
        way = Captured()
        net.server.receive(datagram, ("127.0.0.1", 9), way)
        if not way.sent:
            break
        answers += 1
        [(datagram, _)] = way.sent
    assert 0 < answers <= MAX_RESET_BYTES


def test_a_flood_gets_a_bounded_number_of_resets(certificate: CertificateFiles) -> None:
    net, way = Net(certificate), Captured()
    for _ in range(int(RESETS_PER_S) * 3):
        net.server.receive(short(60), ("127.0.0.1", 9), way)
    assert len(way.sent) == RESETS_PER_S
    net.now += 0.1
    for _ in range(100):
        net.server.receive(short(60), ("127.0.0.1", 9), way)
    assert RESETS_PER_S < len(way.sent) <= RESETS_PER_S * 1.1 + 1


def test_a_connection_that_stands_is_not_reset(net: Net) -> None:
    client = net.client()
    way = Captured()
    connection = next(iter(net.server._connections))
    known = next(cid for cid in connection.cids if len(cid) == 8)
    net.server.receive(short(60, known), client.address, way)
    assert way.sent == []
    assert client.get(b"/still") == b"GET /still 0"
