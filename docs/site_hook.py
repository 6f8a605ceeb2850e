"""MkDocs hook: pages from files outside docs/, generated reference pages, and checks of the result.

Each text exists once in the repository. Files such as PROTOCOL.md become pages of the site, and
relative links are rewritten, so that one link works in a checkout and on the site.
docs/reference_pages.py writes settings, commands and the HTTP API.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference_pages import api_page, commands_page, settings_page

from tailrace.edge.openapi.document import openapi_document

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
# Pages of the site by the file of the repository that holds their text.
OUTSIDE_DOCS = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "PROTOCOL.md": "protocol.md",
    "SECURITY.md": "security.md",
    "kernels/BENCH.md": "bench/kernels.md",
    "tests/bench/ENGINE.md": "bench/engine.md",
    "tests/bench/HTTP3.md": "bench/http3.md",
    "tests/bench/LEDGER.md": "bench/ledger.md",
    "tests/bench/WORKER.md": "bench/worker.md",
    "tests/vectors/README.md": "reference/vectors.md",
}
SOURCES = {page: source for source, page in OUTSIDE_DOCS.items()}

_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_SCHEME = re.compile(r"^[a-z][a-z+.-]*:|^//")
# References that a browser would fetch from other sites while it shows a page.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["'](?:https?:)?//[^"']*"""
    r"""|<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon)[^>]*href=["'](?:https?:)?//[^"']*"""
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages whose text lies outside docs/, and those that are generated."""
    pages = {page: (ROOT / source).read_text("utf-8") for source, page in OUTSIDE_DOCS.items()}
    pages["reference/settings.md"] = settings_page()
    pages["reference/commands.md"] = commands_page()
    pages["reference/api.md"] = api_page()
    pages["reference/openapi.json"] = json.dumps(openapi_document(), indent=1)
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_serve(server: Any, *, config: MkDocsConfig, builder: Any) -> Any:
    """Build again when a file outside docs/ changes."""
    for source in OUTSIDE_DOCS:
        server.watch(str(ROOT / source))
    return server


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the relative links of a page outside fenced code."""
    uri = page.file.src_uri
    source = SOURCES.get(uri, DOCS + uri)
    fence = ""
    parts: list[tuple[bool, list[str]]] = []
    for line in markdown.split("\n"):
        found = _FENCE.match(line)
        in_code = bool(fence or found)
        if found and fence in ("", found[1]):
            fence = "" if fence else found[1]
        if not parts or parts[-1][0] != in_code:
            parts.append((in_code, []))
        parts[-1][1].append(line)
    # The text of a link may go on in the next line.
    return "\n".join(
        text if in_code else _LINK.sub(lambda link: _relinked(link, source, uri, files), text)
        for in_code, text in ((in_code, "\n".join(lines)) for in_code, lines in parts)
    )


def on_page_context(context: dict[str, Any], *, page: Page, **_: Any) -> dict[str, Any]:
    """Offer no link that edits a generated page."""
    page.edit_url = None
    return context


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would fetch a font, a script or a picture from another site."""
    if fetched := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {fetched[0]}")
    return output


def _relinked(link: re.Match[str], source: str, uri: str, files: Files) -> str:
    """Return a link as the site needs it, or its text if the file is not on the site."""
    picture, text, target = link.groups()
    path, hash_mark, anchor = target.partition("#")
    if not path or _SCHEME.match(target):
        return link[0]
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    on_site = OUTSIDE_DOCS.get(inside, inside.removeprefix(DOCS))
    if files.get_file_from_path(on_site) is None or not (
        inside in OUTSIDE_DOCS or inside.startswith(DOCS)
    ):
        if picture or not (ROOT / inside).exists():
            raise PluginError(f"{source} links to {target}, which does not exist")
        return text
    relative = posixpath.relpath(on_site, posixpath.dirname(uri) or ".")
    return f"{picture}[{text}]({relative}{hash_mark}{anchor})"
