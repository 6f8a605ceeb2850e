"""`tailrace key` as a person uses it, and what it leaves in the file."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.edge.access.keys import changing, digest_of, read_keys
from tailrace.ledger.errors import CallerError, ConfigError, NotFound, TailraceError


def said(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    if isinstance(result.exception, TailraceError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*words: object) -> Any:
    return json.loads(said(*words, "--json"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "data" / "api-keys.json"


def test_a_key_is_shown_once_and_only_its_hash_is_kept(keys: Path) -> None:
    text = said("key", "add", "web", "--keys", keys).strip()
    assert text.startswith("tr_")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    kept = keys.read_text()
    assert text.split("_", 2)[2] not in kept and digest_of(text) in kept
    listed = said("key", "list", "--keys", keys)
    assert text.split("_", 2)[2] not in listed and "active" in listed
    assert list(keys.parent.iterdir()) == [keys]


def test_tenant_rights_and_limits_are_those_that_were_given(keys: Path) -> None:
    first = as_json(
        *("key", "add", "web", "--keys", keys, "--tenant", "acme", "--rights", "read, cancel"),
        *("--requests-per-s", 2.5, "--max-unfinished", 8, "--expires-days", 1),
    )
    assert first["rights"] == ["read", "cancel"]
    assert first["limits"] == {"requests_per_s": 2.5, "max_unfinished": 8}
    assert first["expires"] > first["created"]
    second = as_json("key", "add", "batch", "--keys", keys, "--tenant", "acme", "--tokens-per-s", 9)
    assert second["limits"] == first["limits"] | {"tokens_per_s": 9}
    everything = as_json("key", "add", "root", "--keys", keys, "--rights", "admin")
    assert len(everything["rights"]) == 7 and everything["tenant"] == "default"
    ring = read_keys(keys).ring()
    assert ring.limits("acme").tokens_per_s == 9
    assert ring.limits("default").tokens_per_s is None


def test_a_key_may_be_bound_to_a_class(keys: Path) -> None:
    made = as_json("key", "add", "night", "--keys", keys, "--class", "batch")
    assert made["class"] == "batch"
    assert json.loads(keys.read_text())["keys"][0]["class"] == "batch"
    assert as_json("key", "add", "web", "--keys", keys)["class"] is None
    header, night, web = said("key", "list", "--keys", keys).splitlines()
    place = header.split().index("class")
    assert (night.split()[place], web.split()[place]) == ("batch", "-")
    with pytest.raises(CallerError, match="'urgent' is not a priority class"):
        said("key", "add", "x", "--keys", keys, "--class", "urgent")


def test_a_budget_is_of_one_key(keys: Path) -> None:
    options = ("--tokens-per-day", 200_000, "--tokens-per-month", 3_000_000)
    first = as_json("key", "add", "ci", "--keys", keys, *options)
    assert first["budgets"] == {"tokens_per_day": 200_000, "tokens_per_month": 3_000_000}
    assert first["limits"] == {}
    assert as_json("key", "add", "web", "--keys", keys)["budgets"] == {}
    assert "tokens_per_day=200000 tokens_per_month=3000000" in said("key", "list", "--keys", keys)


@pytest.mark.parametrize("option", ["--tokens-per-day", "--tokens-per-month"])
@pytest.mark.parametrize(
    ("tokens", "why"),
    [(0, "a budget of 0 would refuse every request"), (-1, "greater than"), (10**15, "less than")],
)
def test_a_budget_that_cannot_be_is_refused(keys: Path, option: str, tokens: int, why: str) -> None:
    with pytest.raises(CallerError, match=why) as refused:
        said("key", "add", "ci", "--keys", keys, option, tokens)
    assert refused.value.field == option.removeprefix("--").replace("-", "_")
    assert not keys.exists() or read_keys(keys).keys == []


def test_a_budget_of_0_in_the_file_is_named(keys: Path) -> None:
    said("key", "add", "ci", "--keys", keys, "--tokens-per-day", 7)
    keys.write_text(keys.read_text().replace('"tokens_per_day": 7', '"tokens_per_day": 0'))
    with pytest.raises(ConfigError, match="a budget of 0 would refuse every request") as refused:
        read_keys(keys)
    assert "keys[0].tokens_per_day" in str(refused.value)


def test_a_revoked_key_stays_in_the_list(keys: Path) -> None:
    made = as_json("key", "add", "web", "--keys", keys)
    said("key", "revoke", made["id"], "--keys", keys)
    again = as_json("key", "revoke", made["key"], "--keys", keys)
    [listed] = as_json("key", "list", "--keys", keys)
    assert (listed["state"], listed["revoked"]) == ("revoked", again["revoked"])
    with pytest.raises(NotFound, match="no key 000"):
        said("key", "revoke", "000000000000", "--keys", keys)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["add", "web", "--tenant", "A/b"], "is not a valid tenant name"),
        (["add", "web", "--rights", "raed"], "is not a right"),
        (["add", "", "--tenant", "a"], "invalid name"),
        (["add", "web", "--tenant", "a", "--rights", "admin"], "tenant 'a' cannot have the right"),
        (["add", "web", "--requests-per-s", "0"], "requests_per_s"),
        (["add", "web", "--tokens-per-s", "-1"], "tokens_per_s"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    keys: Path, words: list[str], why: str
) -> None:
    with pytest.raises(CallerError, match=why):
        said("key", *words, "--keys", keys)
    assert not keys.exists()


def test_a_file_that_is_not_there_or_no_key_file_is_named(keys: Path) -> None:
    for command in (("list",), ("revoke", "0" * 12)):
        with pytest.raises(ConfigError, match=r"api-keys\.json: No such file"):
            said("key", *command, "--keys", keys)
    keys.parent.mkdir(exist_ok=True)
    keys.write_text('{"keys": [{"id": "x"}]}')
    with pytest.raises(ConfigError, match=r"keys\[0\]\.id: the value is not valid .*pattern"):
        said("key", "list", "--keys", keys)
    assert keys.read_text() == '{"keys": [{"id": "x"}]}'


def test_the_file_is_that_of_the_settings(tmp_path: Path) -> None:
    config = tmp_path / "tailrace.toml"
    config.write_text(f'[edge]\napi_keys = "{tmp_path}/mine.json"\n')
    said("key", "add", "web", "--config", config)
    assert (tmp_path / "mine.json").exists()


def test_two_that_change_the_file_at_once_do_not_undo_each_other(keys: Path) -> None:
    said("key", "add", "one", "--keys", keys)
    [one] = read_keys(keys).keys

    def add() -> None:
        for _ in range(5):
            with changing(keys) as stored:
                stored.keys.append(one)

    others = [threading.Thread(target=add) for _ in range(3)]
    with changing(keys) as stored:
        for other in others:
            other.start()  # they wait for us
        stored.keys.append(one)
    for other in others:
        other.join()
    assert len(read_keys(keys).keys) == 17
