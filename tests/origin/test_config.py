"""Settings of an origin and of its ledger."""

from pathlib import Path

import pytest

from tailrace.config_file import report
from tailrace.ledger.errors import ConfigError
from tailrace.origin.config import LedgerConfig, OriginConfig

URL = "postgresql://tailrace:open-sesame@db.example/tailrace"


def test_a_ledger_is_a_file_or_a_url_but_not_both(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text('[ledger]\npath = "ledger.db"\n')
    with pytest.raises(ConfigError, match=r"^ledger: give path or url, not both$"):
        LedgerConfig.load(file, url=URL)


@pytest.mark.parametrize("url", ["", "ledger.db", "mysql://open-sesame@db", "host=db"])
def test_a_url_of_something_else_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="write postgresql://") as error:
        LedgerConfig.load(url=url)
    assert "open-sesame" not in str(error.value)


def test_the_password_of_a_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_LEDGER_URL", URL)
    config = LedgerConfig.load()
    assert config.url is not None
    assert config.url.get_secret_value() == URL
    for shown in (repr(config), str(config), report([LedgerConfig], None, as_json=True)):
        assert "open-sesame" not in shown


@pytest.mark.parametrize("lease_s", [0.5, 1, 2, 3, 10, 60])
def test_an_origin_that_is_busy_for_a_second_is_heard_in_time(lease_s: float) -> None:
    config = LedgerConfig.load(lease_s=lease_s)
    assert config.heartbeat_s + 1 < config.silence_timeout_s
    assert config.heartbeat_s <= 5  # PROTOCOL.md promises this
    assert config.silence_timeout_s == max(lease_s, 2)


@pytest.mark.parametrize("lease_s", [0.4, 61, "soon"])
def test_a_lease_out_of_range_is_refused(lease_s: object) -> None:
    with pytest.raises(ConfigError, match=r"^ledger\.lease_s: "):
        LedgerConfig.load(lease_s=lease_s)


def test_the_keys_are_in_the_data_folder_unless_origins_share_them() -> None:
    assert OriginConfig.load(data=Path("data")).keys_path == Path("data/resume-keys.json")
    assert OriginConfig.load(keys=Path("shared.json")).keys_path == Path("shared.json")


@pytest.mark.parametrize("metrics", ["9090", "localhost", "localhost:", "localhost:99999"])
def test_metrics_need_a_host_and_a_port(metrics: str) -> None:
    with pytest.raises(ConfigError, match=r"^origin\.metrics: "):
        OriginConfig.load(metrics=metrics)


def test_metrics_are_served_only_where_that_was_asked_for() -> None:
    assert OriginConfig.load().metrics_address is None
    assert OriginConfig.load(metrics="[::1]:9090").metrics_address == ("::1", 9090)


@pytest.mark.parametrize("setting", ["retention_s", "cold_after_s", "sweep_s"])
@pytest.mark.parametrize("value", [1e17, float("inf")])
def test_a_time_that_no_clock_reaches_is_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^ledger\.{setting}: .*less than or equal to"):
        LedgerConfig.load(None, **{setting: value})
