"""Vendored files are the ones that their table names, with their checksums."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest

from tests.schema_text import ROOT

FOLDERS = ("edge/web/console/vendor", "edge/web/tailrace/vendor")
OWN = {"README.md", "marked.d.ts"}
ROW = re.compile(r"^\| ([\w./]+) \|.*\| ([0-9a-f]{64}) \|$", re.MULTILINE)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_vendored_file_is_listed_with_its_checksum(name: str) -> None:
    folder = ROOT / name
    listed = dict(ROW.findall((folder / "README.md").read_text("utf-8")))
    found = {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert listed == {file: digest for file, digest in found.items() if file not in OWN}
