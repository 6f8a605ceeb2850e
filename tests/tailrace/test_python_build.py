"""Recognising how the running Python was built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.python_build import Built, python_build

# Values of `sysconfig` from builds that exist, cut to what matters.
DEBIAN_12: dict[str, Any] = {
    "CONFIG_ARGS": "'--enable-shared' '--prefix=/usr' 'CFLAGS=-g   -fstack-protector-strong '",
    "PGO_PROF_GEN_FLAG": "-fprofile-generate",
    "PGO_PROF_USE_FLAG": "",
    "PY_CFLAGS": "-Wsign-compare -DNDEBUG -g -fwrapv -O2 -Wall",
    "Py_DEBUG": 0,
    "Py_ENABLE_SHARED": 1,
}
PYENV: dict[str, Any] = {
    "CONFIG_ARGS": "'--prefix=/p' '--enable-shared' 'LDFLAGS=-L/p/lib -Wl,-rpath,/p/lib'",
    "PGO_PROF_GEN_FLAG": "-fprofile-generate",
    "PGO_PROF_USE_FLAG": "-fprofile-use -fprofile-correction",
    "PY_CFLAGS": "-Wsign-compare -DNDEBUG -g -O3 -Wall",
    "Py_DEBUG": 0,
    "Py_ENABLE_SHARED": 1,
}
DOCKER = PYENV | {
    "CONFIG_ARGS": "'--build=x86_64-linux-gnu' '--enable-loadable-sqlite-extensions'"
    " '--enable-optimizations' '--enable-option-checking=fatal' '--enable-shared' '--with-lto'"
}
LINKED = "7f00-7f01 r-xp 00000000 fe:00 1 /usr/local/lib/libpython3.12.so.1.0\n"
WITHIN = "5500-5501 r-xp 00000000 fe:00 1 /usr/bin/python3.11\n"


@pytest.mark.parametrize(
    ("variables", "pgo", "lto"),
    [
        (DEBIAN_12, Built.DISTRIBUTION, Built.DISTRIBUTION),
        (PYENV, Built.NO, Built.NO),
        (DOCKER, Built.YES, Built.YES),
        (PYENV | {"CONFIG_ARGS": "'--with-lto=no'"}, Built.NO, Built.NO),
        (PYENV | {"CONFIG_ARGS": "'--with-lto=thin'"}, Built.NO, Built.YES),
        (PYENV | {"PY_CORE_CFLAGS": "-O3 -fprofile-use"}, Built.YES, Built.NO),
        (PYENV | {"PY_LDFLAGS_NOLTO": "-flto", "LDFLAGS": "-flto=auto -g"}, Built.NO, Built.YES),
        ({}, Built.UNKNOWN, Built.UNKNOWN),
    ],
)
def test_the_optimisations_are_read_from_the_variables(
    variables: dict[str, Any], pgo: Built, lto: Built
) -> None:
    build = python_build(variables, LINKED)
    assert (build.pgo, build.lto) == (pgo, lto)
    assert build.is_optimised is (pgo in (Built.YES, Built.DISTRIBUTION))


def test_a_shared_library_is_one_that_the_process_has_loaded() -> None:
    assert python_build(DEBIAN_12, WITHIN).shared_library is Built.NO
    assert python_build(DOCKER, LINKED).shared_library is Built.YES
    assert python_build(DOCKER, "").shared_library is Built.YES  # no /proc: what the build says
    assert python_build({}, "").shared_library is Built.UNKNOWN


def test_the_jit_and_threads_without_a_lock_are_told() -> None:
    plain = python_build(DOCKER, LINKED)
    assert (plain.jit, plain.free_threaded) == (Built.NO, False)
    arguments = DOCKER["CONFIG_ARGS"] + " '--enable-experimental-jit=yes-off'"
    odd = python_build(DOCKER | {"CONFIG_ARGS": arguments, "Py_GIL_DISABLED": 1}, LINKED)
    assert (odd.jit, odd.free_threaded) == (Built.YES, True)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (PYENV, "was built without profile-guided optimisation"),
        (DOCKER | {"Py_DEBUG": 1}, "is a debug build"),
        ({}, "does not say whether it was built with profile-guided optimisation"),
    ],
)
def test_a_build_that_is_not_optimised_is_told_in_one_line_with_its_cure(
    variables: dict[str, Any], said: str
) -> None:
    warning = python_build(variables, LINKED).warning()
    assert warning is not None
    assert said in warning
    assert "--enable-optimizations" in warning
    assert "\n" not in warning


def test_an_optimised_build_is_worth_no_warning() -> None:
    assert python_build(DEBIAN_12, WITHIN).warning() is None
    assert python_build(DOCKER, LINKED).warning() is None


def test_the_module_warns_of_the_python_that_runs_it() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tailrace.python_build"], capture_output=True, text=True, check=True
    )
    warning = python_build().warning()
    assert run.stdout == ""
    assert run.stderr == ("" if warning is None else f"warning: {warning}\n")


@pytest.mark.parametrize("variables", [PYENV, DOCKER])
def test_config_check_warns_of_a_build_that_is_not_optimised(
    variables: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_vars", lambda: variables)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["config", "check", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)
    warning = python_build(variables).warning()
    assert done.stderr == ("" if warning is None else f"warning: {warning}\n")


def test_make_warns_after_each_install() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text("utf-8")
    installs = re.findall(r"\$\(PIP_INSTALL\) -e .*\n(.*)", makefile)
    assert installs == ["\t@$(BIN)/python -m tailrace.python_build"] * 2
