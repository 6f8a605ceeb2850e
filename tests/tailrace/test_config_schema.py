"""`tailrace config schema`: it takes what the settings take, and refuses what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tailrace.config_file import commented
from tailrace.config_schema import DIALECT, SCHEMA_FILE
from tailrace.edge.config import EdgeConfig
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import Settings
from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig
from tailrace.origin.pool.model_table import load_tables

PARTS: tuple[type[Settings], ...] = (EdgeConfig, OriginConfig, LedgerConfig, StreamsConfig)


@cache
def schema() -> dict[str, Any]:
    """Return what the command prints."""
    command = (sys.executable, "-m", "tailrace.cli", "config", "schema")
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(said.stdout)
    return document


def takes(text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(schema()).is_valid(tomllib.loads(text)))


def is_loaded(text: str, folder: Path) -> bool:
    file = folder / "settings.toml"
    file.write_text(text)
    try:
        load_tables(file)
        for part in PARTS:
            part.load(file)
    except ConfigError:
        return False
    return True


def test_it_is_a_schema_and_names_every_setting_with_its_meaning() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == DIALECT
    for part in PARTS:
        properties = schema()["properties"][part.table]["properties"]
        assert properties.keys() == part.model_fields.keys()
        assert all(said["description"] for said in properties.values())
    assert str(Path(__file__).parents[2]) not in json.dumps(schema())


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('[edge]\nhttp = "127.0.0.1:8080"\n', True),
        ('[edge]\nhttp = ["127.0.0.1:8080", "[::1]:8080"]\n', True),
        ("[edge]\nhttp = 8080\n", False),
        ("[edge]\nmax_connections = 0\n", False),
        ('[edge]\nhtpp = "127.0.0.1:8080"\n', False),
        ('[origin]\ndevice = "tpu"\n', False),
        ('[origin]\ndevice = "cpu"\nworkers = 2\n', True),
        ("[origin]\nworkers = 65\n", False),
        ('[models."org/name:3b"]\nupstream = "http://127.0.0.1:8000/v1"\npin = true\n', True),
        ("[models.small]\nfolder = 3\n", False),
        ("[ledger]\nretention_s = 60\n", True),
        ("[legder]\nretention_s = 60\n", False),
    ],
)
def test_it_agrees_with_what_loads_the_file(text: str, good: bool, tmp_path: Path) -> None:
    assert takes(text) is good
    if "legder" not in text:  # a table that is unknown is the command line's to refuse
        assert is_loaded(text, tmp_path) is good


def test_the_file_that_init_writes_refers_to_it() -> None:
    text = commented(PARTS)
    assert text.startswith(f"#:schema ./{SCHEMA_FILE}\n")
    assert takes(text)
