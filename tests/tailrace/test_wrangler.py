"""`--wrangler FILE`, as a process: what is printed, and that no secret is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.config_file import load, settings_of
from tailrace.edge.config import EdgeConfig
from tailrace.ledger.errors import ConfigError

FILE = """\
{ // a Worker of ours
  "name": "relay", "main": "src/index.ts", "compatibility_date": "2026-01-31",
  "dev": {"port": 0},
  "env": {"staging": {"vars": {"TAILRACE_EDGE_ORIGIN": "127.0.0.1:1", "MODE": "x"},
    "limits": {"cpu_ms": 5},},},
}
"""
SECRET = "hunter-two-hunter-two"


def tailrace(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "TAILRACE" not in name}
    return subprocess.run(
        [sys.executable, "-m", "tailrace.cli", *words],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wrangler.jsonc").write_text(FILE)
    (tmp_path / ".dev.vars").write_text("TAILRACE_EDGE_NO=1\n")
    secrets = f"TAILRACE_EDGE_ORIGIN_SECRET={SECRET}\n"
    (tmp_path / ".dev.vars.staging").write_text(secrets)
    return tmp_path


def test_config_check_says_what_each_key_does(folder: Path) -> None:
    line = ("config", "check", "--wrangler", "wrangler.jsonc", "--env", "staging")
    result = tailrace(folder, *line, "--json")
    assert result.returncode == 0, result.stderr
    effects = {row["key"]: row["effect"] for row in json.loads(result.stdout)}
    assert effects["env.staging.vars.TAILRACE_EDGE_ORIGIN"] == "honoured"
    assert effects[".dev.vars.staging: TAILRACE_EDGE_ORIGIN_SECRET"] == "honoured"
    assert effects["env.staging.limits"] == effects["env.staging.vars.MODE"] == "ignored"
    told = tailrace(folder, *line)
    assert SECRET not in told.stdout + told.stderr + result.stdout
    assert told.stdout.splitlines()[0].split() == ["key", "effect", "why"]


def test_what_is_refused_is_listed_and_ends_with_2(folder: Path) -> None:
    (folder / "wrangler.jsonc").write_text(FILE.replace('"dev"', '"r2_buckets": [], "dve"'))
    result = tailrace(folder, "config", "check", "--wrangler", "wrangler.jsonc", "--json")
    assert result.returncode == 2
    assert {row["key"] for row in json.loads(result.stdout)} == {"r2_buckets", "dve"}
    assert "wrangler.jsonc: " in result.stderr and "and 1 more" in result.stderr
    edge = tailrace(folder, "edge", "--wrangler", "wrangler.jsonc")
    assert (edge.returncode, edge.stderr) == (2, result.stderr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("edge", "--env", "staging"), "--env needs --wrangler FILE"),
        (("edge", "--wrangler", "a", "--config", "b"), "not both"),
        (("edge", "--wrangler", "missing.toml"), "missing.toml: No such file"),
        (("edge", "--wrangler", "wrangler.jsonc", "--env", "live"), "there are: staging"),
        (("edge", "--wrangler", "wrangler.jsonc"), "TAILRACE_EDGE_NO: is not a setting of an edge"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_says_why(folder: Path, words: tuple[str, ...], said: str) -> None:
    result = tailrace(folder, *words)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr


def test_flags_win_over_the_environment_and_that_over_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "wrangler.jsonc"

    def settings(**flags: object) -> EdgeConfig:
        return settings_of(load(file, "staging"), **flags)

    assert settings().origin == ("127.0.0.1:1",)
    assert settings().http == ("localhost:0",)
    secret = settings().origin_secret
    assert secret is not None and secret.get_secret_value() == SECRET
    monkeypatch.setenv("TAILRACE_EDGE_ORIGIN", "127.0.0.1:2")
    assert settings(http=None).origin == ("127.0.0.1:2",)
    assert settings(origin="127.0.0.1:3").origin == ("127.0.0.1:3",)


def test_a_value_that_does_not_fit_names_its_key_but_no_secret(folder: Path) -> None:
    file = folder / "wrangler.jsonc"
    (folder / ".dev.vars.staging").write_text(f"TAILRACE_EDGE_DRAIN_S={SECRET}\n")
    with pytest.raises(
        ConfigError, match=r"TAILRACE_EDGE_DRAIN_S: the value is not valid \(it is"
    ) as raised:
        settings_of(load(file, "staging"))
    assert SECRET not in str(raised.value)
    file.write_text(FILE.replace("127.0.0.1:1", "nowhere"))
    (folder / ".dev.vars.staging").unlink()
    (folder / ".dev.vars").unlink()
    said = r"wrangler\.jsonc: env\.staging\.vars\.TAILRACE_EDGE_ORIGIN: "
    with pytest.raises(ConfigError, match=said):
        settings_of(load(file, "staging"))
