"""An edge's link to an origin over each kind of address: which are accepted and refused."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from structlog.testing import capture_logs

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.links.transport import Credentials, LinkAddress, listen
from tailrace.origin.edges.link import EdgeLink
from tailrace.origin.edges.peers import PeerTransport, connect
from tailrace.origin.generations.resume_tokens import TokenKeys
from tests.edge.scripted_origin import until
from tests.origin.edges.test_link import House, serving

pytestmark = pytest.mark.anyio

SECRET = b"a secret of both sides"
PLAIN = LinkAddress("127.0.0.1", 0)
TLS = LinkAddress("127.0.0.1", 0, "tls")


class Authority:
    """A private CA that writes PEM files to a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(self._name, self._key, ca=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def credentials(self, setting: str, name: str) -> Credentials:
        """Return credentials that this CA has signed, for a side that trusts it."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate, private = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        signed = self._signed(subject, key, ca=False)
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return Credentials(setting, self.ca, certificate, private)

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if not ca:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


@pytest.fixture
async def house(tmp_path: Path, checkpoint: Path) -> AsyncIterator[House]:
    async with serving(tmp_path, checkpoint) as made:
        yield made


@asynccontextmanager
async def listening(
    house: House, address: LinkAddress, credentials: Credentials
) -> AsyncIterator[LinkAddress]:
    """Yield an origin's link; gives the address that it has."""

    def made() -> EdgeLink:
        return EdgeLink(house.service, house.links, house.fatal.append, credentials.secret)

    server = await listen(made, address, credentials)
    try:
        if address.scheme != "unix":
            address = address._replace(port=server.sockets[0].getsockname()[1])
        yield address
    finally:
        for link in list(house.links):
            link.close()
        server.close()


@asynccontextmanager
async def linked(address: LinkAddress, credentials: Credentials) -> AsyncIterator[OriginPool]:
    link = OriginPool(address, credentials=credentials, backoff=Backoff(0.01, 0.01))
    async with link.running():
        yield link


async def comes_up(house: House, address: LinkAddress, edge: Credentials, here: Credentials) -> str:
    """Return "up", or the reason why the link is not up."""
    with capture_logs() as logs:
        async with listening(house, address, here) as at, linked(at, edge) as link:
            await until(lambda: link.up or any("link down" in log["event"] for log in logs))
            if link.up:
                return "up"
    return next(str(log["reason"]) for log in logs if "link down" in log["event"])


def of(setting: str, secret: bytes | None = None) -> Credentials:
    return Credentials(setting, secret=secret)


async def test_a_unix_socket_is_for_its_owner_and_takes_streams(
    house: House, tmp_path: Path
) -> None:
    address = LinkAddress(str(tmp_path / "link.sock"), 0, "unix")
    async with listening(house, address, of("origin.link")):
        assert stat.S_IMODE((tmp_path / "link.sock").stat().st_mode) == 0o600
        async with linked(address, of("edge.origin")) as link:
            await until(lambda: link.heartbeat.ready)


async def test_both_sides_know_one_secret(house: House) -> None:
    ours, other = SECRET, b"another secret of theirs"
    edge, here = "edge.origin", "origin.link"
    assert await comes_up(house, PLAIN, of(edge, ours), of(here, ours)) == "up"
    why = await comes_up(house, PLAIN, of(edge, other), of(here, ours))
    assert "different link secrets" in why
    assert "this one has none" in await comes_up(house, PLAIN, of(edge), of(here, ours))
    assert "the origin has not proved" in await comes_up(house, PLAIN, of(edge, ours), of(here))
    assert "secret of" not in why


async def test_both_sides_have_a_certificate_of_one_private_ca(
    house: House, tmp_path: Path
) -> None:
    ca, other = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    edge, here = ca.credentials("edge.origin", "edge"), ca.credentials("origin.link", "origin")
    stranger = other.credentials("edge.origin", "stranger")
    assert await comes_up(house, TLS, edge, here) == "up"
    # The edge does not take an origin that its CA has not signed...
    assert "CERTIFICATE_VERIFY_FAILED" in await comes_up(house, TLS, stranger, here)
    # ...nor the origin an edge that shows another CA's certificate, or none.
    for shown in (replace(stranger, ca=ca.ca), replace(edge, certificate=None, key=None)):
        assert await comes_up(house, TLS, shown, here) != "up"


async def test_origins_of_one_ledger_reach_each_other_by_the_same_way(
    house: House, tmp_path: Path
) -> None:
    ca = Authority(tmp_path, "ours")
    here = replace(ca.credentials("origin.link", "origin"), secret=SECRET)
    keys = house.service.keys
    async with listening(house, TLS, here) as at:
        place = f"{at.host}:{at.port}"
        peer = await connect(place, PeerTransport("tls", here, keys.peer_secrets(SECRET)))
        assert peer is not None
        other = TokenKeys({"k": b"b" * 32})
        rotated = TokenKeys({"k": bytes(32), "new": b"b" * 32})
        for shown in (keys.peer_secrets(b"another secret"), other.peer_secrets(SECRET), (SECRET,)):
            assert await connect(place, PeerTransport("tls", here, shown)) is None
        again = await connect(place, PeerTransport("tls", here, rotated.peer_secrets(SECRET)))
        assert again is not None
        again.close()
        peer.close()
        await until(lambda: peer.closed)
