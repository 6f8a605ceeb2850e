"""Faults and notes about a checkpoint, and a reader of its JSON files that collects them.

All findings of a checkpoint are collected, to be listed together or raised as one error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.ledger.errors import ModelError

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Maximum size of a JSON file in bytes; the largest real tokenizers have 40 MB."""
MAX_COUNT = 2**31 - 1
"""Maximum of a whole number: that of an int32, which the kernels use."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, or a note, about one place in one file."""

    file: Path
    where: str
    """The key or the tensor; empty for the file itself."""
    problem: str
    """The problem, with the value that was found."""
    right: str | None
    """Something that would be right, or None if that is not known."""
    fault: bool
    """True if the checkpoint cannot be served; False for a note."""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.problem}"


class Findings:
    """Collects findings; after a bad value, reading continues with a stand-in."""

    def __init__(self) -> None:
        self._found: dict[Finding, None] = {}  # a set in order: a file may be read twice

    @property
    def all(self) -> list[Finding]:
        return list(self._found)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self._found if finding.fault]

    def fault(self, file: Path, where: str, problem: str, right: str | None = None) -> None:
        """Add a fault, with which the checkpoint cannot be served."""
        self._found[Finding(file, where, problem, right, fault=True)] = None

    def note(self, file: Path, where: str, problem: str, right: str | None = None) -> None:
        """Add a note, with which the checkpoint is served all the same."""
        self._found[Finding(file, where, problem, right, fault=False)] = None

    def refuse(self) -> None:
        """Raise ModelError for the first fault, if there is one."""
        if faults := self.faults:
            raise refusal(faults[0], len(faults) - 1)


def refusal(finding: Finding, others: int = 0) -> ModelError:
    """Return the error for a fault: its `field` is the file, its message names key or tensor.

    `others` is the number of further faults.
    """
    more = f", and {others} more that `tailrace model check` lists" if others else ""
    right = f"expected {finding.right}" if finding.right else None
    return ModelError(f"{finding}{more}", field=str(finding.file), hint=right)


def read_object(path: Path, findings: Findings) -> dict[str, Any] | None:
    """Return the JSON object in a file; None, and a fault, if it cannot be read."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            findings.fault(path, "", f"is larger than {MAX_JSON_BYTES} bytes")
            return None
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        findings.fault(path, "", "cannot be read: there is no such file")
        return None
    except (OSError, ValueError, RecursionError) as exc:
        findings.fault(path, "", f"cannot be read: {exc}")
        return None
    if not isinstance(raw, dict):
        findings.fault(path, "", "is not a JSON object")
        return None
    return raw


def read_object_if_there(path: Path, findings: Findings) -> dict[str, Any]:
    """Return the JSON object in an optional file; empty if the file is missing or faulty."""
    return (read_object(path, findings) or {}) if path.exists() else {}


class JsonObject:
    """One JSON object of a file, read key by key; null counts as missing.

    A value of the wrong kind is a fault that names the key. A stand-in takes its place, so that
    the rest is checked as well.
    """

    def __init__(self, file: Path, raw: dict[str, Any], findings: Findings, prefix: str = ""):
        self.file = file
        self.raw = raw
        self.findings = findings
        self._prefix = prefix

    def fault(self, key: str, problem: str, right: str | None = None) -> None:
        """Add a fault of the value at `key`."""
        self.findings.fault(self.file, self._name(key), problem, right)

    def note(self, key: str, problem: str, right: str | None = None) -> None:
        """Add a note about the value at `key`."""
        self.findings.note(self.file, self._name(key), problem, right)

    def count(
        self, key: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT
    ) -> int:
        """Return a whole number from `least` to `most`; a missing one needs a default."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            self.fault(key, self._shown(key), f"a whole number above {least - 1}")
            return least
        if value > most:
            self.fault(key, self._shown(key), f"at most {most}")
            return least
        return value

    def number(
        self, key: str, default: float | None = None, above: float = 0.0, most: float = math.inf
    ) -> float:
        """Return a number above `above`, at most `most`; a missing one needs a default."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            value = math.nan
        elif abs(value) > sys.float_info.max:
            value = math.inf
        if not (math.isfinite(value) and above < value <= most):
            bound = "" if most == math.inf else f", at most {most:g}"
            self.fault(key, self._shown(key), f"a number above {above:g}{bound}")
            return above + 1.0
        return float(value)

    def not_negative(self, key: str, default: float, most: float = math.inf) -> float:
        """Return a number from 0 to `most`."""
        return 0.0 if self.raw.get(key) == 0 else self.number(key, default, most=most)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or None if it is missing."""
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.fault(key, self._shown(key), "true or false")
            return default
        return default if value is None else value

    def only(self, key: str, right: object, default: object = None) -> None:
        """Add a fault unless the value is `right`; a missing one counts as `default`."""
        value = self.raw.get(key)
        if (default if value is None else value) != right:
            self.fault(key, self._shown(key), repr(right))

    def nothing_but(self, known: Set[str]) -> None:
        """Add a fault for each key that is not in `known`."""
        for key, value in self.raw.items():
            if key not in known and value is not None:
                self.fault(
                    key, shown(value), "no such key, because its effect on the result is not known"
                )

    def child(self, key: str) -> JsonObject | None:
        """Return the object at `key`; None if it is missing or, which is a fault, not an object."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            self.fault(key, self._shown(key), "an object")
        if not isinstance(value, dict):
            return None
        return JsonObject(self.file, value, self.findings, f"{self._prefix}{key}.")

    def _name(self, key: str) -> str:
        return (self._prefix + key).rstrip(".")

    def _shown(self, key: str) -> str:
        return shown(self.raw[key]) if key in self.raw else "is missing"


def shown(value: object) -> str:
    """Return a value as JSON, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"
