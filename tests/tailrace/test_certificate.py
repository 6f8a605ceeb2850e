"""The development certificate that `tailrace up` makes."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tailrace.up import CertificateFiles, development_certificate

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def load(files: CertificateFiles) -> x509.Certificate:
    return x509.load_pem_x509_certificate(files.certificate.read_bytes())


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return development_certificate(tmp_path / "certs", NOW)


def test_it_names_this_machine_in_every_spelling(files: CertificateFiles) -> None:
    names = load(files).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["127.0.0.1", "::1"]


def test_a_browser_may_trust_it_by_hash(files: CertificateFiles) -> None:
    certificate = load(files)
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lifetime <= timedelta(days=14)
    assert certificate.not_valid_before_utc < NOW


def test_openssl_takes_the_pair(files: CertificateFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)


def test_only_the_owner_reads_the_key(files: CertificateFiles) -> None:
    assert files.key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("later", "same"), [(12, True), (13, False), (20, False)])
def test_it_is_used_again_while_valid_for_more_than_a_day(
    files: CertificateFiles, later: int, same: bool
) -> None:
    before = load(files)
    again = development_certificate(files.certificate.parent, NOW + timedelta(days=later))
    assert (load(again) == before) is same


@pytest.mark.parametrize("damage", ["certificate", "key"])
def test_a_damaged_pair_is_made_anew(files: CertificateFiles, damage: str) -> None:
    if damage == "certificate":
        files.certificate.write_text("-----BEGIN CERTIFICATE-----\n")
    else:
        files.key.unlink()
    test_openssl_takes_the_pair(development_certificate(files.certificate.parent, NOW))
