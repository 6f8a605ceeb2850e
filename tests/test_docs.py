"""Links in Markdown lead to files and headings that exist, and the site lists every page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.reference_pages import PARTS, api_page, commands_page, settings_page
from tailrace.edge.openapi.document import openapi_document
from tailrace.ledger.sqlite.disk.schema import SCHEMA_VERSION, UPGRADED_VERSIONS
from tests.test_house import ROOT, files_of_the_tree

FENCE = re.compile(r"^ *(```|~~~)")
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
SCHEME = re.compile(r"[a-z][a-z+.-]*:|//")
PAGES = sorted(path for path in files_of_the_tree() if path.suffix == ".md")
# Pages that the build of the site writes: docs/site_hook.py.
GENERATED = {"reference/api.md", "reference/commands.md", "reference/settings.md"}


def lines_outside_code(page: Path) -> Iterator[str]:
    """Yield the lines of a page that are not in fenced code."""
    fence = ""
    for line in page.read_text("utf-8").splitlines():
        found = FENCE.match(line)
        if found and fence in ("", found[1]):
            fence = "" if fence else found[1]
        elif not fence:
            yield line


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    anchors: set[str] = set()
    for line in lines_outside_code(page):
        if heading := re.match(r"#{1,6} +(.*?) *#*$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            again = sum(1 for one in anchors if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one))
            anchors.add(f"{slug}-{again}" if again else slug)
    return anchors


def links_of(page: Path) -> Iterator[str]:
    """Yield the relative links of a page."""
    for line in lines_outside_code(page):
        for found in LINK.finditer(line):
            target: str = found[1] or found[2]
            if not SCHEME.match(target):
                yield target


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    wrong = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken(page) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n[a](#one-two-three) [b](#four) [c](none.md)\n"
        "[d](page.md#one-two-three) [e](https://example.com/none)\n```\n[f](none)\n```\n",
        "utf-8",
    )
    assert broken(page) == ["#four", "none.md"]


def test_the_site_lists_every_page_of_docs() -> None:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r"([\w/-]+\.md)\s*$", settings, re.MULTILINE))
    hook = (ROOT / "docs/site_hook.py").read_text("utf-8")
    outside = set(re.findall(r'^    "[\w/.]+": "([\w/]+\.md)",$', hook, re.MULTILINE))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == docs | outside | GENERATED


def test_the_reference_has_every_setting_command_and_route() -> None:
    settings, commands, api = settings_page(), commands_page(), api_page()
    names = [f"{part.table}.{name}" for part in PARTS for name in part.model_fields]
    assert [name for name in names if f"### `{name}`\n" not in settings] == []
    for command in ("tailrace up", "tailrace ledger verify", "tailrace warm simulate"):
        assert f"# {command}\n" in commands
    assert "--until-eof" not in commands  # hidden
    assert [path for path in openapi_document()["paths"] if f" {path}`\n" not in api] == []


def test_the_page_of_the_ledger_names_the_versions_of_the_layout() -> None:
    page = " ".join((ROOT / "docs/ledger.md").read_text("utf-8").split())
    older = " or ".join(str(version) for version in UPGRADED_VERSIONS)
    assert f"(`PRAGMA user_version`, now {SCHEMA_VERSION})" in page
    assert f"opens a file of version {older} brings it up to date" in page
    assert f"Releases that know only versions {older} refuse an upgraded file" in page
    assert f"If it is older than version {min(UPGRADED_VERSIONS)}, move it away" in page
