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
"""Maximum of whole numbers in a config: the largest int32, because the kernels use int32."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a checkpoint, or a note about it, at one place in one file."""

    file: Path
    where: str
    """Name of the key or tensor at fault; empty if the finding is about the whole file."""
    problem: str
    """The problem, with the value that was found."""
    right: str | None
    """Description of a valid value, or None if there is none to suggest."""
    fault: bool
    """True if the checkpoint cannot be served; False for a note."""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.problem}"


class Findings:
    """Collects all findings about a checkpoint, so that reading continues after a fault."""

    def __init__(self) -> None:
        # An ordered set, because a file that is read twice gives the same findings twice.
        self._found: dict[Finding, None] = {}

    @property
    def all(self) -> list[Finding]:
        return list(self._found)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self._found if finding.fault]

    def fault(self, file: Path, where: str, problem: str, right: str | None = None) -> None:
        """Add a fault, which means that the checkpoint cannot be served."""
        self._found[Finding(file, where, problem, right, fault=True)] = None

    def note(self, file: Path, where: str, problem: str, right: str | None = None) -> None:
        """Add a note, which does not keep the checkpoint from being served."""
        self._found[Finding(file, where, problem, right, fault=False)] = None

    def refuse(self) -> None:
        """Raise ModelError for the first fault, if there is one."""
        if faults := self.faults:
            raise refusal(faults[0], len(faults) - 1)


def refusal(finding: Finding, others: int = 0) -> ModelError:
    """Return a fault as an error, whose `field` is the file and whose message names key or tensor.

    `others` is the number of further faults, which the message mentions.
    """
    more = f", and {others} more that `tailrace model check` lists" if others else ""
    right = f"expected {finding.right}" if finding.right else None
    return ModelError(f"{finding}{more}", field=str(finding.file), hint=right)


def read_object(path: Path, findings: Findings) -> dict[str, Any] | None:
    """Return the JSON object in a file; if it cannot be read, add a fault and return None."""
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
    """One JSON object of a file, whose values are read by key; null counts as missing.

    A value of the wrong type is a fault that names the key. The methods then return a valid
    placeholder, so that all other values are checked as well.
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
        """Return a whole number from `least` to `most`.

        A missing value is a fault unless there is a default.
        """
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
        """Return a number above `above` and at most `most`.

        A missing value is a fault unless there is a default.
        """
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
        """Return a number from 0 to `most`; `default` for a missing value."""
        return 0.0 if self.raw.get(key) == 0 else self.number(key, default, most=most)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or None if it is missing."""
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; `default` for a missing value."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.fault(key, self._shown(key), "true or false")
            return default
        return default if value is None else value

    def only(self, key: str, right: object, default: object = None) -> None:
        """Add a fault unless the value is `right`; a missing value counts as `default`."""
        value = self.raw.get(key)
        if (default if value is None else value) != right:
            self.fault(key, self._shown(key), repr(right))

    def nothing_but(self, known: Set[str]) -> None:
        """Add a fault for each key that is not in `known`."""
        for key, value in self.raw.items():
            if key not in known and value is not None:
                self.fault(
                    key, shown(value), "no such key: its effect on the model's output is not known"
                )

    def child(self, key: str) -> JsonObject | None:
        """Return the object at `key`, or None if it is missing. Any other value is a fault."""
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
