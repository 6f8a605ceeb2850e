"""A certificate for development, so that HTTPS and HTTP/3 work with no ceremony.

EC P-256 and at most 14 days, which is also what a browser asks of a certificate that it is
to trust by hash (W3C WebTransport, serverCertificateHashes).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 14
REUSE_DAYS = 1  # a certificate with less than this left is made anew
CLOCK_SKEW = timedelta(minutes=5)  # a client's clock may be behind ours

NAMES: tuple[x509.GeneralName, ...] = (
    x509.DNSName("localhost"),
    x509.IPAddress(ip_address("127.0.0.1")),
    x509.IPAddress(ip_address("::1")),
)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files of a certificate and of its private key."""

    certificate: Path
    key: Path


def development_certificate(folder: Path, now: datetime) -> CertificateFiles:
    """The certificate for localhost in `folder`, made there if none is valid for a day more.

    `now` is an aware time. The key's file can be read by its owner only.
    """
    files = CertificateFiles(folder / "localhost.crt", folder / "localhost.key")
    if not _usable(files, now):
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(key, now)
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        _write(files.key, key_pem, mode=0o600)
        _write(files.certificate, certificate.public_bytes(Encoding.PEM), mode=0o644)
    return files


def _usable(files: CertificateFiles, now: datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        held = files.key.is_file()
    except (OSError, ValueError):
        return False
    return held and certificate.not_valid_after_utc - now > timedelta(days=REUSE_DAYS)


def _sign(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tailrace development")])
    begins = now.astimezone(UTC) - CLOCK_SKEW
    server_only = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(NAMES), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(server_only, critical=False)
        .sign(key, hashes.SHA256())
    )


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Write a whole file or none, with `mode` from its first byte on."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    part.replace(path)
