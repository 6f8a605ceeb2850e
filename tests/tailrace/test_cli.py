"""The command line, as a process: what it prints and its exit codes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.up import development_certificate


def tailrace(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "TAILRACE" not in name}
    return subprocess.run(
        [sys.executable, "-m", "tailrace.cli", *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def checked(folder: Path, *arguments: str, **environment: str) -> dict[str, tuple[object, str]]:
    """Return what `config check --json` says: setting -> (value, source)."""
    result = tailrace("config", "check", *arguments, "--json", folder=folder, **environment)
    assert result.returncode == 0, result.stderr
    return {row["name"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}


# ---- config check ----


def test_config_check_without_a_file_shows_defaults(tmp_path: Path) -> None:
    settings = checked(tmp_path)
    assert settings["edge.origin"] == (["127.0.0.1:8470"], "default")
    assert {source for _, source in settings.values()} == {"default"}


def test_config_check_shows_where_each_setting_came_from(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text('[edge]\norigin = "10.0.0.1:1"\nhttp = ["0.0.0.0:80"]\n[ledger]\nsweep_s = 5\n')
    settings = checked(tmp_path, TAILRACE_EDGE_ORIGIN="10.0.0.2:2")
    assert settings["edge.origin"] == (["10.0.0.2:2"], "TAILRACE_EDGE_ORIGIN")
    assert settings["edge.http"] == (["0.0.0.0:80"], "tailrace.toml")
    assert settings["ledger.sweep_s"] == (5, "tailrace.toml")
    assert settings["origin.workers"] == (1, "default")


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ('upstream = "http://h/v1"\nweights = "int8"\nmodel = "m"', ["model", "weights"]),
        ('producer = "m:f"\ndevice = "cpu"\nupstream_retry_s = 1', ["device", "upstream_retry_s"]),
        ('text_streams = 3\nhead = "int8"', ["text_streams"]),
        ('head = "int8"\n[models.a]\nupstream = "http://h/v1"\n[models.b]\nfolder = "m"', []),
    ],
)
def test_config_check_names_what_has_no_effect(tmp_path: Path, text: str, idle: list[str]) -> None:
    (tmp_path / "tailrace.toml").write_text(f"[origin]\n{text}\n")
    done = tailrace("config", "check", "--json", folder=tmp_path)
    said = [row["name"] for row in json.loads(done.stdout) if not row["has_effect"]]
    assert said == [f"origin.{name}" for name in idle]
    table = tailrace("config", "check", folder=tmp_path).stdout.splitlines()
    named = [
        line.split()[0] for line in table if line.endswith("has no effect on the served model")
    ]
    assert named == said


def test_config_check_reads_the_file_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[origin]\nworkers = 3\n")
    assert checked(tmp_path, str(file))["origin.workers"] == (3, str(file))
    assert checked(tmp_path, "--config", str(file))["origin.workers"] == (3, str(file))


def test_config_check_prints_a_line_a_setting_for_people(tmp_path: Path) -> None:
    result = tailrace("config", "check", folder=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["setting", "value", "from"]
    assert ["origin.workers", "1", "default"] in [line.split() for line in lines]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[edge]\nhtttp = []\n", "edge.htttp: unknown setting"),
        ("[origin]\nworkers = 0\n", "origin.workers: "),
        ("[edge]\norigin = 'nowhere'\n", "write HOST:PORT"),
        ("[kernels]\n", "unknown table [kernels]"),
        ("[edge\n", "tailrace.toml"),
    ],
)
def test_config_check_refuses_a_wrong_file_with_exit_code_2(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "tailrace.toml").write_text(text)
    result = tailrace("config", "check", folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stdout == ""


def test_config_check_says_all_that_is_wrong_in_any_part_each_on_a_line(tmp_path: Path) -> None:
    text = "[edge]\nhtttp = []\norigin = ['nowhere']\n[ledger]\nlease_s = 'long'\n"
    (tmp_path / "tailrace.toml").write_text(text)
    lines = tailrace("config", "check", folder=tmp_path).stderr.splitlines()
    keys = ["edge.origin[0]", "edge.htttp", "ledger.lease_s"]
    assert [line.removeprefix("error: ").split(":")[0].strip() for line in lines] == keys


def test_config_check_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = tailrace("config", "check", "missing.toml", folder=tmp_path)
    assert result.returncode == 2
    assert "missing.toml is not a file" in result.stderr


def test_a_wrong_setting_in_the_environment_is_named(tmp_path: Path) -> None:
    result = tailrace("config", "check", folder=tmp_path, TAILRACE_ORIGIN_WORKERS="many")
    assert result.returncode == 2
    assert "origin.workers" in result.stderr


# ---- usage ----


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat"],
        ["chat", "hello", "--cut-after", "0"],
        ["chat", "hello", "--temperature", "warm"],
        ["chat", "hello", "--edge", "localhost:8080"],
        ["up", "--http-port", "70000"],
        ["edge", "--origin", "nowhere"],
        ["origin", "--workers", "0"],
        ["nothing"],
        ["--nothing"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_says_why_on_stderr(
    tmp_path: Path, arguments: list[str]
) -> None:
    result = tailrace(*arguments, folder=tmp_path)
    assert result.returncode == 2
    assert "Error" in result.stderr or result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("setting", ["http", "https"])
def test_an_edge_whose_port_is_taken_names_the_address(tmp_path: Path, setting: str) -> None:
    files = development_certificate(tmp_path, datetime.now(UTC))
    flags = ["--certificate", str(files.certificate), "--key", str(files.key)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"http": "127.0.0.1:0", "https": "127.0.0.1:0"}
        places[setting] = f"127.0.0.1:{taken.getsockname()[1]}"
        for name, place in places.items():
            flags += [f"--{name}", place]
        result = tailrace("edge", *flags, folder=tmp_path)
    assert result.returncode == 2
    assert f"edge.{setting}: cannot listen on {places[setting]}: " in result.stderr


def test_an_edge_that_others_can_reach_needs_keys_before_it_listens(tmp_path: Path) -> None:
    result = tailrace("edge", "--http", "0.0.0.0:0", folder=tmp_path)
    assert result.returncode == 2
    assert "there are no API keys" in result.stderr and "tailrace key add" in result.stderr
    assert "--allow-public-without-keys" in result.stderr
    assert "Running on" not in result.stderr and "Traceback" not in result.stderr


def test_an_edge_whose_certificate_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "edge.pem").write_text("no certificate")
    flags = ["--http", "127.0.0.1:0", "--https", "127.0.0.1:0"]
    flags += ["--certificate", "edge.pem", "--key", "edge.pem"]
    result = tailrace("edge", *flags, folder=tmp_path)
    assert result.returncode == 2
    assert "edge.certificate: cannot read edge.pem" in result.stderr


def test_the_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    result = tailrace("--version", folder=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("tailrace ")


# ---- messages ----


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("nowhere/at/all", "give the folder of a checkpoint"),
        ("Some/Model-1B", "hf download Some/Model-1B --local-dir Model-1B"),
    ],
)
def test_an_origin_without_a_model_folder_says_how_to_get_one(
    model: str, hint: str, tmp_path: Path
) -> None:
    result = tailrace("origin", "--model", model, folder=tmp_path)
    assert result.returncode == 2
    assert f"error: origin.model: {model} does not exist (" in result.stderr
    assert hint in result.stderr
    (tmp_path / "tailrace.toml").write_text(f'[models.one]\nfolder = "{model}"\n')
    result = tailrace("origin", folder=tmp_path)
    assert result.returncode == 2
    assert f"error: models.one: {model} does not exist (" in result.stderr


def test_an_origin_whose_port_is_taken_names_it_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        link = f"127.0.0.1:{taken.getsockname()[1]}"
        result = tailrace("origin", "--link", link, folder=tmp_path)
    assert result.returncode == 2
    [said] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: origin.link: cannot listen on {link}: Address already in use (")


def test_chat_without_an_edge_says_how_to_start_one(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = tailrace("chat", "hello", "--edge", url, folder=tmp_path)
    assert result.returncode == 1
    hint = "start one with tailrace up, or name another: --edge URL"
    assert result.stderr.splitlines()[-1] == f"error: no edge answers at {url} ({hint})"


def test_help_lists_every_command(tmp_path: Path) -> None:
    result = tailrace("--help", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    commands = re.findall(r"^  ([a-z]+) {2,}\S", result.stdout, re.MULTILINE)
    assert (
        commands == "up edge origin chat top usage config gpu key ledger model warm bench".split()
    )
