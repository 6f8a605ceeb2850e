"""Debian's Chromium, driven by Playwright, as a client of an edge over HTTP/2 or HTTP/3."""

from __future__ import annotations

import hashlib
import os
import shutil
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate
from playwright.async_api import Browser, async_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000


def program() -> str:
    """Return where it is; skips the test where it is not, but in CI."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say("needs a Chromium: apt install chromium")
    assert found is not None
    return found


@asynccontextmanager
async def browser(
    certificate: Path, *ports: int, more: Sequence[str] = ()
) -> AsyncIterator[Browser]:
    """One that trusts the certificate, and speaks HTTP/3 to localhost at `ports`, and nowhere else.

    `more` are further arguments for it.

    A browser does not follow Alt-Svc to a certificate that no authority has signed, so it is told.
    """
    quic = ",".join(f"localhost:{port}" for port in ports)
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        *(("--enable-quic", f"--origin-to-force-quic-on={quic}") if ports else ("--disable-quic",)),
        "--host-resolver-rules=MAP localhost 127.0.0.1",
        f"--ignore-certificate-errors-spki-list={key_hash(certificate)}",
        *more,
    ]
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=program(), args=arguments)
        try:
            yield launched
        finally:
            await launched.close()


def key_hash(certificate: Path) -> str:
    """Return the hash of a certificate's public key, as browsers pin it (RFC 7469, 2.4)."""
    key = load_pem_x509_certificate(certificate.read_bytes()).public_key()
    info = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return b64encode(hashlib.sha256(info).digest()).decode()
