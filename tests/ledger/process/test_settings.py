"""Settings from a file, the environment and the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import Settings


class Part(Settings):
    """Settings of an edge, cut to two."""

    table: ClassVar[str] = "edge"
    retired: ClassVar[Mapping[str, str]] = {"hosts_file": "hosts are not read from a file"}
    model_config = SettingsConfigDict(env_prefix="TAILRACE_EDGE_")

    port: int = Field(1, ge=1, le=65_535)
    name: str = "default"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tailrace.toml"
    file.write_text(text)
    return file


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "[edge]\nport = 2\nname = 'file'\n")
    assert Part.load(file) == Part(port=2, name="file")
    monkeypatch.setenv("TAILRACE_EDGE_PORT", "3")
    assert Part.load(file).port == 3
    assert Part.load(file, port=4).port == 4
    assert Part.load(file, port=None).port == 3
    assert Part.load(file).name == "file"


def test_the_file_in_the_working_directory_is_read_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Part.load().port == 1
    written(tmp_path, "[edge]\nport = 2\n")
    assert Part.load().port == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[edge]\nprot = 2\n", "edge.prot: unknown setting"),
        (
            "[edge]\nport = 0\n",
            r"edge.port: 0 is not valid \(must be greater than or equal to 1; see",
        ),
        ("[edge]\nport = 'x'\n", r'edge.port: "x" is not valid \(must be a valid integer'),
        ("[egde]\nport = 2\n", r"unknown table \[egde\].*\[edge\], \[origin\], \[models\]"),
        ("edge = 3\n", "edge must be a table"),
        ("[edge\n", "tailrace.toml"),
    ],
)
def test_a_bad_file_is_refused_with_its_key_and_what_would_be_right(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Part.load(written(tmp_path, text))


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"absent\.toml does not exist \(tailrace config init .*absent\.toml writes one\)",
    ):
        Part.load(tmp_path / "absent.toml")


def test_a_bad_environment_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_EDGE_PORT", "70000")
    with pytest.raises(ConfigError, match="TAILRACE_EDGE_PORT"):
        Part.load(written(tmp_path, ""))


def test_a_misspelt_environment_variable_is_refused_with_a_guess(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAILRACE_EDGE_PROT", "2")
    monkeypatch.setenv("TAILRACE_EDGE_QUITE_ELSE", "2")
    with pytest.raises(ConfigError) as refused:
        Part.load()
    assert str(refused.value).splitlines() == [
        "TAILRACE_EDGE_PROT: unknown environment variable (did you mean TAILRACE_EDGE_PORT?)",
        "  TAILRACE_EDGE_QUITE_ELSE: unknown environment variable"
        " (unset it; tailrace config check lists the settings)",
    ]


@pytest.mark.parametrize("name", ["TAILRACE_EGDE_PORT", "TAILRACE_EDGEPORT", "tailrace_ege_port"])
def test_a_variable_with_a_misspelt_part_is_refused_with_a_guess(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError) as refused:
        Part.load()
    expected = f"{name}: unknown environment variable (did you mean TAILRACE_EDGE_PORT?)"
    assert str(refused.value) == expected


def test_the_variables_of_another_part_and_of_a_kubernetes_service_are_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "TAILRACE_ORIGIN_PROT",
        "TAILRACE_API_KEY",
        "TAILRACE_UPSTREAM_KEY",
        "TAILRACE_SERVICE_PORT",
        "TAILRACE_EDGE_SERVICE_HOST",
        "TAILRACE_EDGE_SERVICE_PORT",
        "TAILRACE_EDGE_SERVICE_PORT_HTTP",
        "TAILRACE_EDGE_PORT_80_TCP",
        "TAILRACE_EDGE_PORT_80_TCP_ADDR",
    ):
        monkeypatch.setenv(name, "tcp://10.0.0.1:80")
    assert Part.load() == Part()


def test_a_setting_of_an_earlier_release_is_accepted_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path, "[edge]\nport = 2\nhosts_file = 'x'\n")
    assert Part.load(file).port == 2
    monkeypatch.setenv("TAILRACE_EDGE_HOSTS_FILE", "y")
    assert Part.load().port == 1
    reason = "edge.hosts_file has no effect any more: hosts are not read from a file"
    assert caplog.messages == [
        f"{reason}; remove it from {file}",
        f"{reason}; remove it from TAILRACE_EDGE_HOSTS_FILE",
    ]
