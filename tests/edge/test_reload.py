"""With which keys an edge starts, and which it goes by when their file changes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.edge.access.keys import KeyRing, changing
from tailrace.edge.config import EdgeConfig
from tailrace.edge.reload import WatchedFile, open_authenticator, reloading, watched_keys
from tailrace.ledger.errors import ConfigError

PUBLIC = ("0.0.0.0:80",)


def made(path: Path) -> Path:
    with changing(path):
        pass
    return path


def test_on_loopback_no_keys_are_needed_until_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_authenticator(EdgeConfig()).ring is None
    made(Path(".tailrace/api-keys.json"))
    assert open_authenticator(EdgeConfig()).ring is not None


def test_a_public_address_without_keys_is_refused_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--allow-public-without-keys"):
        open_authenticator(EdgeConfig(http=PUBLIC))
    assert open_authenticator(EdgeConfig(http=PUBLIC, allow_public_without_keys=True)).ring is None
    keys = made(tmp_path / "keys.json")
    assert open_authenticator(EdgeConfig(http=PUBLIC, api_keys=keys)).ring is not None


def test_keys_that_are_named_have_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.json: No such file"):
        open_authenticator(EdgeConfig(api_keys=tmp_path / "keys.json"))
    (tmp_path / "keys.json").write_text("{}{")
    with pytest.raises(ConfigError, match="is not a valid file of API keys"):
        open_authenticator(EdgeConfig(api_keys=tmp_path / "keys.json"))


def test_a_file_that_is_made_later_closes_the_gate_and_no_loss_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = EdgeConfig()
    authenticator = open_authenticator(config)
    keys = watched_keys(config, authenticator)

    def after(change: Callable[[], object]) -> KeyRing | None:
        change()
        keys.look()
        return authenticator.ring

    assert after(lambda: None) is None
    ring = after(lambda: made(config.api_keys))
    assert ring is not None
    assert after(lambda: config.api_keys.write_text("half a fi")) is ring
    assert after(config.api_keys.unlink) is ring
    assert after(lambda: made(config.api_keys)) not in (ring, None)


@pytest.mark.anyio
async def test_sighup_reads_at_once_and_a_change_is_seen_without(tmp_path: Path) -> None:
    file, reads = tmp_path / "file", asyncio.Queue[bool]()
    file.write_text("a")
    async with reloading(WatchedFile("file", (file,), lambda: reads.put_nowait(True))):
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(30):
            await reads.get()
            file.write_text("longer")
            await reads.get()
    assert reads.empty()
