"""Rules about the files of the tree: the paths they name, versions, types, the licence."""

from __future__ import annotations

import re

import tailrace
from tests.test_house import PACKAGES, ROOT, files_of_the_tree, modules_in


def test_the_paths_and_modules_that_texts_name_exist() -> None:
    """Paths from the root, modules that are run, and file names in backticks must exist."""
    files = {path.relative_to(ROOT).as_posix(): path for path in files_of_the_tree()}
    tops = "|".join({re.escape(name.partition("/")[0]) for name in files if "/" in name})
    paths = re.compile(rf"(?<![\w/.:@{{}}-])((?:{tops})/[\w.*/-]*\w)")
    names = re.compile(r"`(\w+\.(?:bare|md|py))`")
    modules = re.compile(rf"-m ((?:{tops})\.[\w.]*\w)")
    known = {path.name for path in files.values()}
    # The entries of the package on npm have the first word of our own on PyPI.
    entries = {name.removeprefix("edge/web/").removesuffix(".js") for name in files}
    missing = []
    for name, path in files.items():
        # tests/test_house.py makes up names; the changelog names files that are gone.
        if path.suffix not in {".md", ".py", ".toml"} and path.name != "Makefile":
            continue
        if name in ("tests/test_house.py", "CHANGELOG.md"):
            continue
        text = path.read_text("utf-8")
        found = [one for one in paths.findall(text) if one not in entries]
        found = [one for one in found if next(ROOT.glob(one), None) is None]
        found += [one for one in names.findall(text) if one not in known]
        run = {one.replace(".", "/") for one in modules.findall(text)}
        found += [one for one in run if not (ROOT / f"{one}.py").is_file()]
        missing += [f"{name}: {one}" for one in found]
    assert missing == []


def test_no_file_that_pins_versions_names_where_they_come_from() -> None:
    """Mirrors differ between machines, and the file outlives the server behind an address."""
    address = re.compile(r'--(?:extra-)?index-url|--find-links|"resolved"\s*:\s*"http|@\s*\w+://')
    pins = [
        path
        for path in files_of_the_tree()
        if re.search(r"(?i)lock|constraints|requirements|pyproject|^package\.json$", path.name)
    ]
    assert {ROOT / "constraints.txt", ROOT / "pyproject.toml"} <= set(pins)
    for path in pins:
        text = path.read_text("utf-8")
        assert not address.search(text), f"{path} names an address"
        if not path.name.startswith("package"):
            assert "://" not in text, f"{path} names an address"


def test_no_group_is_repeated_possessively() -> None:
    """CPython 3.11.0 to 3.11.4 (Debian 12 has 3.11.2) can match such a repetition wrongly.

    The one repetition that exists gives the same results as a greedy one on those versions.
    """
    possessive = re.compile(r"\)(?:[*+?]|\{[0-9,%d]+\})\+")
    found = [
        f"{path.relative_to(ROOT).as_posix()}: {line.strip()}"
        for name in PACKAGES
        for path in modules_in(name)
        for line in path.read_text("utf-8").splitlines()
        if possessive.search(line)
    ]
    assert [line.partition(" = ")[0] for line in found] == ["edge/generate/schema.py: _PART"]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    home = re.compile(rb"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in files_of_the_tree()
        if home.search(path.read_bytes())
    ]
    assert found == []


def test_every_package_says_that_it_is_typed() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_the_licence_is_apache_2_0() -> None:
    words = (ROOT / "LICENSE").read_text("utf-8").split()
    assert " ".join(words[:6]) == "Apache License Version 2.0, January 2004"
    assert " ".join(words[-12:]).endswith(
        "governing permissions and limitations under the License."
    )
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_what_a_program_needs_is_named_by_the_package() -> None:
    assert tailrace.__all__ == sorted(tailrace.__all__)
    for name in tailrace.__all__:
        assert getattr(tailrace, name).__name__ == name
