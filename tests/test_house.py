"""Rules on dependencies: which package imports which, and what each install imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = ("edge", "kernels", "ledger", "origin")
PACKAGES = (*SUBPACKAGES, "tailrace")
# The packages that each package may import; demo/ is the trainer, which is not shipped.
ARROWS = {
    "demo": {"kernels", "ledger", "origin"},
    "edge": {"ledger"},
    "kernels": set[str](),
    "ledger": set[str](),
    "origin": {"kernels", "ledger"},
    "tailrace": {"edge", "ledger", "origin"},
}
# Protocols and rules: plain objects fed bytes and a clock.
SANS_IO = (
    "edge/wrangler/*.py",
    "edge/access/[!_mo]*.py",  # but the middleware, and what asks for open files
    *("edge/ai_sdk.py", "edge/openai/responses/events.py", "edge/openai/responses/request.py"),
    *("edge/anthropic/conversation.py", "edge/anthropic/events.py", "edge/anthropic/request.py"),
    *("edge/origins/load_balancing.py", "edge/origins/link_protocol.py", "edge/origins/re[ln]*.py"),
    *("edge/origins/route*.py", "edge/origins/sink.py", "edge/origins/watchers.py"),
    *("edge/session.py", "edge/sse.py", "edge/server/interfaces.py", "edge/server/deadlines.py"),
    *(
        "edge/quic/interface.py",
        "edge/quic/aioquic_*.py",
        "edge/quic/http3.py",
        "edge/quic/server.py",
    ),
    *("edge/server/http1*.py", "edge/server/http2*.py"),
    *("ledger/frame.py", "ledger/flow/credit_window.py", "ledger/wire/*.py"),
    *("ledger/sqlite/encoding.py", "ledger/sqlite/capacity.py", "ledger/sqlite/tail.py"),
    *("origin/engine/*.py", "origin/scheduler/*.py", "origin/streams/append.py"),
    *("origin/gpu/faults.py", "origin/core/*.py", "origin/workers/liveness.py"),
    *("origin/streams/chunks.py", "origin/streams/cursors.py", "origin/streams/offsets.py"),
    *("origin/streams/page.py", "origin/streams/request.py", "origin/pool/policies/*.py"),
    "origin/pool/*.py",
    "origin/subscriptions/subscription.py",
)
OUTSIDE = {"aiosqlite", "apsw", "asyncio", "httpx", "psycopg", "socket", "sqlite3"}
# Folders and modules of the origin that import torch, directly or indirectly.
WORKER_SIDE = (
    *("tailrace.origin.models", "tailrace.origin.workers.token_worker"),
    *(
        "tailrace.origin.engine.drafts",
        "tailrace.origin.engine.engine",
        "tailrace.origin.engine.generation",
    ),
)
# Parts of the ledger that need an extra.
OF_AN_EXTRA = (
    "tailrace.ledger.postgres",
    "tailrace.ledger.telemetry",
    "tailrace.ledger.inspection.postgres_reader",
)
# Folders that git ignores, or that hold no text of ours.
SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site"}

BLOCKED_IMPORT = """
import importlib, sys
blocked, *names = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split(",")))
for name in names:
    importlib.import_module(name)
"""


def files_of_the_tree() -> Iterator[Path]:
    """Yield every file that could be tracked; needs no git, so that an unpacked archive works too.

    A worktree has a file `.git`, which says where its repository is.
    """
    folders = [ROOT]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_symlink() and path.is_dir():
                continue  # from `tailrace` to the folders at the top level
            if path.is_dir() and (not path.name.startswith(".") or path.name == ".ci"):
                if path.name not in SKIPPED:
                    folders.append(path)
            elif path.is_file() and path.name != ".git":
                yield path


def modules_in(package: str) -> list[Path]:
    """Return the files of a folder at the top level; links lead from `tailrace` to four of them."""
    links = {ROOT / "tailrace" / name for name in PACKAGES}
    found = sorted((ROOT / package).rglob("*.py"))
    return [path for path in found if links.isdisjoint(path.parents)]


def modules_of(package: str) -> list[str]:
    """`ledger` -> ["tailrace.ledger", "tailrace.ledger.interface", …]."""
    names = [module_name(path) for path in modules_in(package)]
    assert names, f"{package} holds no modules"
    return names


def module_name(path: Path) -> str:
    """Return the one name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in SUBPACKAGES:
        parts = ("tailrace", *parts)
    return ".".join(part for part in parts if part != "__init__")


def package_of(module: str) -> str:
    """Return `ledger` for `tailrace.ledger.frame`, and `tailrace` for `tailrace.client`."""
    first, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    return second if first == "tailrace" and second in SUBPACKAGES else first


def imports_of(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, late imports too, and what it imports from one."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module != "tailrace":
                yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def lint(code: str, filename: str) -> str:
    """Return what ruff, with this repository's settings, says about `code` in `filename`."""
    return subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", filename, "-"],
        cwd=ROOT,
        input=code,
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.mark.parametrize("package", ["edge", "ledger"])
def test_edge_and_ledger_import_with_torch_and_triton_blocked(package: str) -> None:
    result = run_python(BLOCKED_IMPORT, "torch,triton", *modules_of(package))
    assert result.returncode == 0, result.stderr


def packages_of_extras() -> str:
    """Return the import names of packages that the base install lacks, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [one for name in ("torch", "gpu", "embed", "postgres") for one in extras[name]]
    listed = [one for one in listed if not one.startswith("tailrace")]
    return ",".join(sorted({re.split(r"[\[>=<]", one)[0].replace("-", "_") for one in listed}))


def test_the_base_install_imports_what_it_declares_and_no_more() -> None:
    own = [*modules_of("edge"), *modules_of("ledger")]
    own = [name for name in own if not name.startswith(OF_AN_EXTRA)]
    result = run_python(BLOCKED_IMPORT, packages_of_extras(), *own)
    assert result.returncode == 0, result.stderr


def test_an_origin_of_upstream_servers_imports_no_package_of_an_extra() -> None:
    parts = (
        "supervisor",
        "serving.model_host",
        "workers.text_worker",
        "producers.upstream",
        "start",
    )
    result = run_python(
        BLOCKED_IMPORT, packages_of_extras(), *(f"tailrace.origin.{p}" for p in parts)
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tailrace --help", "Usage:"),
        ("tailrace ledger --help", "verify"),
        ("tailrace ledger verify --path no.db", "there is no ledger at no.db"),
        ("tailrace ledger verify --url postgresql://x", "pip install 'tailrace[postgres]'"),
        ("tailrace config check", "ledger.lease_s"),
        ("tailrace origin", "pip install 'tailrace[torch]'"),
        ("tailrace model check .", "pip install 'tailrace[torch]'"),
        ("tailrace gpu check", "pip install --force-reinstall 'tailrace[gpu]'"),
        ("from tailrace import Client", ""),
        ("from tailrace import Token, NotFound", ""),
    ],
)
def test_the_base_install_does_what_it_can_and_says_which_extra_is_missing(
    line: str, says: str
) -> None:
    command, _, words = line.partition(" ")
    code = "from tailrace.cli import main; main()" if command == "tailrace" else line
    blocking = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(',')))\n"
    result = run_python(blocking + code, packages_of_extras(), *words.split())
    told = result.stdout + result.stderr
    assert says in told and ("Traceback" not in told or command == "from"), told


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_packages_import_each_other_along_the_arrows_only(package: str) -> None:
    others = ARROWS.keys() - ARROWS[package] - {package}
    wrong = {
        path.relative_to(ROOT).as_posix(): sorted(found)
        for path in modules_in(package)
        if (found := {package_of(name) for name in imports_of(path)} & others)
    }
    assert wrong == {}


def test_the_links_to_origins_know_no_server_and_no_web_framework() -> None:
    foreign = ("starlette", "hypercorn", "tailrace.edge.server", "tailrace.edge.quic")
    wrong = {
        path.name: found
        for path in (ROOT / "edge/origins").glob("*.py")
        if (found := [name for name in imports_of(path) if name.startswith(foreign)])
    }
    assert wrong == {}


def test_no_import_goes_round_in_a_circle_not_even_a_late_one() -> None:
    names = {name for package in ARROWS for name in modules_of(package)}
    graph: TopologicalSorter[str] = TopologicalSorter()
    for package in ARROWS:
        for path in modules_in(package):
            graph.add(module_name(path), *(names & set(imports_of(path))))
    graph.prepare()  # raises CycleError, which names the circle


def test_protocols_and_rules_know_nothing_of_sockets_clocks_and_databases() -> None:
    paths = {path for pattern in SANS_IO for path in ROOT.glob(pattern)}
    assert len(paths) > len(SANS_IO)
    wrong = {
        path.relative_to(ROOT).as_posix(): sorted(found)
        for path in paths
        if (found := {name.partition(".")[0] for name in imports_of(path)} & OUTSIDE)
    }
    assert wrong == {}


def test_who_writes_a_ledger_file_and_who_reads_it_load_one_copy_of_sqlite() -> None:
    """Two copies would drop each other's locks on a file that a process has open through both."""
    modules = {*modules_of("ledger/sqlite"), *modules_of("ledger/inspection")} - {*OF_AN_EXTRA}
    result = run_python(BLOCKED_IMPORT, "aiosqlite,sqlite3", *sorted(modules))
    assert result.returncode == 0, result.stderr


def test_only_a_history_is_opened_by_another_copy_of_sqlite() -> None:
    """Tests, too, alter and read the file of a ledger by the SQLite of its owner."""
    users = {
        path.relative_to(ROOT).as_posix()
        for path in files_of_the_tree()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in (*ARROWS, "tests")
        if {name.partition(".")[0] for name in imports_of(path)} & {"aiosqlite", "sqlite3"}
    }
    # A history is no ledger, and apsw never opens it.
    assert users == {
        "origin/pool/history/sqlite_file.py",
        "tests/origin/pool/history/test_recorder.py",
    }


def test_every_module_of_ours_that_is_imported_is_there() -> None:
    """A checker that is told to let a library's missing types pass must not let ours pass."""
    names = {name for package in ARROWS for name in modules_of(package)}
    for path in (path for package in ARROWS for path in modules_in(package)):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                assert package_of(node.module) not in ARROWS or node.module in names, path
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    lenient = [one for one in (mypy, *mypy["overrides"]) if "ignore_missing_imports" in one]
    excused = [name.partition(".")[0] for one in lenient for name in one["module"]]
    assert excused
    assert set(excused).isdisjoint({*ARROWS, "*", "tests"})


def test_the_supervisor_side_of_the_origin_imports_with_torch_and_triton_blocked() -> None:
    supervisor = [name for name in modules_of("origin") if not name.startswith(WORKER_SIDE)]
    result = run_python(BLOCKED_IMPORT, "torch,triton", *supervisor)
    assert result.returncode == 0, result.stderr


def test_blocking_torch_does_stop_an_import_of_it() -> None:
    result = run_python(BLOCKED_IMPORT, "torch,triton", "torch")
    assert result.returncode != 0
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_a_subpackage_is_one_folder_with_one_name(package: str) -> None:
    assert (ROOT / "tailrace" / package).resolve() == ROOT / package
    module = modules_of(package)[1].removeprefix("tailrace.")
    bare = run_python(f"import {module}")
    assert (bare.returncode == 1 and "ImportError" in bare.stderr) or "No module" in bare.stderr
    whole = run_python(f"import tailrace.{package}")
    assert whole.returncode == 0, whole.stderr


def test_no_file_imports_a_subpackage_by_its_bare_name() -> None:
    tree = (path for path in files_of_the_tree() if path.suffix == ".py")
    wrong = {
        path.relative_to(ROOT).as_posix(): sorted(found)
        for path in tree
        if (found := {name.partition(".")[0] for name in imports_of(path)} & {*SUBPACKAGES})
    }
    assert wrong == {}


@pytest.mark.parametrize("filename", ["edge/x.py", "ledger/x.py", "origin/supervisor.py"])
@pytest.mark.parametrize("module", ["torch", "triton"])
def test_ruff_bans_torch_and_triton_where_they_do_not_belong(filename: str, module: str) -> None:
    assert "TID251" in lint(f"import {module}\n\nprint({module})\n", filename)
    assert "TID251" in lint(f"from {module} import jit\n\nprint(jit)\n", filename)


@pytest.mark.parametrize(
    "filename", ["kernels/x.py", "kernels/rows/x.py", "origin/models/x.py", "demo/x.py"]
)
def test_ruff_lets_kernels_and_workers_import_torch(filename: str) -> None:
    source = '"""Use torch."""\n\nimport torch\n\nprint(torch)\n'
    assert "All checks passed" in lint(source, filename)


def test_help_loads_no_server_and_no_model_library() -> None:
    """Heavy imports are what would make `tailrace --help` slow."""
    result = run_python(
        "import sys, tailrace.cli\n"
        "heavy = {'torch', 'starlette', 'hypercorn', 'httpx', 'pydantic', 'apsw', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert result.stdout.strip() == "[]", result.stderr
