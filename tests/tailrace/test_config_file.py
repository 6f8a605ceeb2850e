"""`tailrace config init`: what it writes is true, and can be read again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.config_file import commented, write
from tailrace.edge.config import EdgeConfig
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import Settings
from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig

PARTS: list[type[Settings]] = [EdgeConfig, OriginConfig, LedgerConfig, StreamsConfig]


NEEDS_OTHERS = {"https"}
"""Settings that are refused by themselves: HTTPS needs a certificate."""


def uncommented(text: str) -> str:
    """With every setting of the parts that has a value said; the tables at the end are examples."""
    text, _, examples = text.partition("\n# [models.NAME]")
    names = {name for part in PARTS for name in part.model_fields} - NEEDS_OTHERS
    settings = {f"# {name} = " for name in names}
    lines = []
    for line in text.splitlines():
        is_setting = any(line.startswith(begin) for begin in settings)
        lines.append(line.removeprefix("# ") if is_setting else line)
    return "\n".join([*lines, "# [models.NAME]", *examples.splitlines()])


@pytest.mark.parametrize("part", PARTS)
def test_what_is_written_are_the_defaults_commented_out_and_said(
    part: type[Settings], tmp_path: Path
) -> None:
    file = tmp_path / "tailrace.toml"
    write(file, PARTS)
    assert part.load(file) == part()
    assert part.load(file).model_fields_set == set()
    file.write_text(uncommented(file.read_text()))
    loaded = part.load(file)
    assert loaded.model_dump() == part().model_dump()
    unsaid = {name for name, info in part.model_fields.items() if info.default is None}
    unsaid |= NEEDS_OTHERS & part.model_fields.keys()
    assert set(part.model_fields) - loaded.model_fields_set - {"model"} == unsaid


def test_every_setting_has_its_description_and_its_range() -> None:
    text = " ".join(commented(PARTS).replace("\n#", " ").split())
    for part in PARTS:
        for name, info in part.model_fields.items():
            assert info.description, name
            about = " ".join(info.description.split())
            assert about[0].upper() + about[1:] in text
            assert f"{name} =" in text
    assert "One of debug, info, warning, error." in text
    assert "At least 1; at most 64." in text


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text("[edge]\n")
    with pytest.raises(ConfigError, match=r"tailrace\.toml: File exists"):
        write(file, PARTS)
    assert file.read_text() == "[edge]\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ke", {"key"}),
        ("config ", {"check", "init", "schema"}),
        ("edge --allow", {"--allow-public-without-keys"}),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, completed: set[str]) -> None:
    line = f"tailrace {words}"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tailrace.cli import app; app(prog_name='tailrace')",
        ],
        env={
            **os.environ,
            "_TAILRACE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words.split(" "))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == completed, done.stderr
