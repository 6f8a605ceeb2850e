"""The build of the running Python: its version and the optimisations that it was built with.

CPython built without profile-guided optimisation takes up to twice the processor time for the same
code. So benchmarks report the build with their figures. This module imports only the standard
library. `python -m tailrace.python_build` prints a warning if the build is not optimised.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

CURE = (
    "use an optimised one, such as the python3 of Debian, Ubuntu, Fedora, python.org or Docker's"
    " python image; pyenv builds one with PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto'"
)
MAPS = Path("/proc/self/maps")


class Built(StrEnum):
    """Tells if the interpreter was built with an option."""

    YES = "yes"
    NO = "no"
    DISTRIBUTION = "distribution"
    """Yes, by indirect evidence: the installed build variables have no flags of the compiler.

    Debian and Ubuntu remove the flags after a build with profile-guided and link-time optimisation.
    CPython's own `configure` always sets some flags for GCC or Clang.
    """
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PythonBuild:
    """Facts about an interpreter's build that determine its speed."""

    version: str
    implementation: str
    compiler: str
    pgo: Built
    lto: Built
    shared_library: Built
    jit: Built
    debug: bool
    free_threaded: bool

    @property
    def is_optimised(self) -> bool:
        """True if this build certainly has profile-guided optimisation and no debug checks."""
        return self.pgo in (Built.YES, Built.DISTRIBUTION) and not self.debug

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"optimised": self.is_optimised}

    def warning(self) -> str | None:
        """Return a line with the problem of this build and the remedy; None if it is optimised."""
        if self.is_optimised:
            return None
        if self.debug:
            reason = "is a debug build"
        elif self.pgo is Built.UNKNOWN:
            reason = "does not say whether it was built with profile-guided optimisation"
        else:
            reason = "was built without profile-guided optimisation"
        return f"Python {self.version} {reason} and may take twice the processor time; {CURE}"


def python_build(
    variables: Mapping[str, Any] | None = None, maps: str | None = None
) -> PythonBuild:
    """Return the build of the running Python.

    Tests pass `variables`, the build variables from `sysconfig`, and `maps`, the text of
    /proc/self/maps. By default they are read from the running process.
    """
    known = sysconfig.get_config_vars() if variables is None else variables
    options = _options(str(known.get("CONFIG_ARGS") or ""))
    flags = " ".join(str(value) for name, value in known.items() if _FLAGS.fullmatch(name))
    return PythonBuild(
        version=platform.python_version(),
        implementation=platform.python_implementation(),
        compiler=platform.python_compiler(),
        pgo=_built(known, options, "--enable-optimizations", "-fprofile-use" in flags),
        lto=_built(known, options, "--with-lto", "-flto" in flags),
        shared_library=_shared(known, _read_maps() if maps is None else maps),
        jit=_jit(options),
        debug=bool(known.get("Py_DEBUG")),
        free_threaded=bool(known.get("Py_GIL_DISABLED")),
    )


_FLAGS = re.compile(r"(PY_)?(CORE_)?(C|LD)FLAGS(_NODIST)?|CONFIGURE_(C|LD)FLAGS(_NODIST)?|OPT")


def _options(text: str) -> dict[str, str]:
    """Return the options of `configure` by name; an option without a value has the value "yes"."""
    found = {}
    for word in shlex.split(text):
        name, has_value, value = word.partition("=")
        found[name] = value if has_value else "yes"
    return found


def _built(
    known: Mapping[str, Any], options: Mapping[str, str], option: str, is_in_flags: bool
) -> Built:
    if options.get(option, "no") != "no" or is_in_flags:
        return Built.YES
    if "CONFIG_ARGS" not in known:
        return Built.UNKNOWN
    if known.get("PGO_PROF_USE_FLAG") == "" and "PGO_PROF_GEN_FLAG" in known:
        return Built.DISTRIBUTION
    return Built.NO


def _shared(known: Mapping[str, Any], maps: str) -> Built:
    """Return YES if libpython is a shared library that this process has loaded.

    The process's memory map shows this. Debian's build variables say "shared" for every build, so
    they are used only if there is no memory map.
    """
    if maps:
        return Built.YES if "/libpython3." in maps else Built.NO
    if "Py_ENABLE_SHARED" not in known:
        return Built.UNKNOWN
    return Built.YES if known["Py_ENABLE_SHARED"] else Built.NO


def _jit(options: Mapping[str, str]) -> Built:
    return Built.YES if options.get("--enable-experimental-jit", "no") != "no" else Built.NO


def _read_maps() -> str:
    return MAPS.read_text("utf-8", errors="replace") if MAPS.exists() else ""


def main() -> None:
    """Print a warning if this build is not optimised."""
    if (warning := python_build().warning()) is not None:
        print(f"warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
