"""Write a repository's address into the packages: `write_addresses.py URL REF`, before `make dist`.

The release workflow runs it, because only a published repository knows where it is. PyPI gets
the project's links and a README whose links work there; npm gets the field `repository`, which
its provenance is checked against. The files of the working tree are changed in place.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)]+)\)")
NPM_FOLDER = "edge/web/tailrace"


def write(root: Path, url: str, ref: str) -> None:
    """Write the address of the repository at `url`, and of its files at the tag or branch `ref`.

    Raises ValueError if pyproject.toml has links already.
    """
    project = root / "pyproject.toml"
    text = project.read_text("utf-8")
    if "[project.urls]" in text:
        raise ValueError("pyproject.toml has [project.urls] already; remove it first")
    links = {
        "Repository": url,
        "Documentation": f"{url}/blob/{ref}/README.md#documentation",
        "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = [f"{name} = {json.dumps(link)}" for name, link in links.items()]
    project.write_text("\n".join([text.rstrip(), "", "[project.urls]", *lines, ""]), "utf-8")

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found["image"] else "blob"
        return f"{found['image']}[{found['text']}]({url}/{kind}/{ref}/{found['path']})"

    readme = root / "README.md"
    readme.write_text(LINK.sub(absolute, readme.read_text("utf-8")), "utf-8")

    package = root / NPM_FOLDER / "package.json"
    manifest = json.loads(package.read_text("utf-8"))
    manifest["repository"] = {"type": "git", "url": f"git+{url}.git", "directory": NPM_FOLDER}
    manifest["homepage"] = f"{url}#readme"
    manifest["bugs"] = f"{url}/issues"
    package.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    _, given_url, given_ref = sys.argv
    write(Path.cwd(), given_url, given_ref)
