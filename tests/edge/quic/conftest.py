"""Fixtures of the QUIC tests: a certificate, and a network in memory."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tailrace.up import CertificateFiles, development_certificate
from tests.edge.quic.net import Net


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return development_certificate(tmp_path_factory.mktemp("certificate"), datetime.now(UTC))


@pytest.fixture
def net(certificate: CertificateFiles) -> Net:
    return Net(certificate)
