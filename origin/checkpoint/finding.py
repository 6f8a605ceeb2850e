"""What is wrong with a checkpoint: found one by one, told all at once or as one refusal.

Its JSON files are read here: every value is checked, and every fault is a finding."""

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
"""The largest real ones are tokenizers, of up to 40 MB."""
MAX_COUNT = 2**31 - 1
"""What an int32 holds: the kernels count with those."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about one place of one file."""

    file: Path
    where: str
    """The key or the tensor; empty for the file itself."""
    problem: str
    """What is there, with its value."""
    right: str | None
    """What would be right, if that can be said."""
    fault: bool
    """The checkpoint cannot be served; otherwise it is only worth knowing."""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.problem}"


class Findings:
    """Collects; the reader of a bad value takes a stand-in and goes on to the next."""

    def __init__(self) -> None:
        self._found: dict[Finding, None] = {}  # a set in order: a file may be read twice

    @property
    def all(self) -> list[Finding]:
        return list(self._found)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self._found if finding.fault]

    def fault(self, file: Path, where: str, problem: str, right: str | None = None) -> None:
        """Something that makes the checkpoint impossible to serve."""
        self._found[Finding(file, where, problem, right, fault=True)] = None

    def note(self, file: Path, where: str, problem: str, right: str | None = None) -> None:
        """Something that is served all the same."""
        self._found[Finding(file, where, problem, right, fault=False)] = None

    def refuse(self) -> None:
        """Raise ModelError for the first fault, if there is one."""
        if faults := self.faults:
            raise refusal(faults[0], len(faults) - 1)


def refusal(finding: Finding, others: int = 0) -> ModelError:
    """The error to raise: `field` is the file, the message names the key or tensor."""
    more = f", and {others} more that `tailrace model check` lists" if others else ""
    right = f"expected {finding.right}" if finding.right else None
    return ModelError(f"{finding}{more}", field=str(finding.file), hint=right)


def read_object(path: Path, findings: Findings) -> dict[str, Any] | None:
    """The JSON object in a file; None, and a fault, if there is none."""
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
    """As `read_object`; empty for a file that may be missing and is, and for a bad one."""
    return (read_object(path, findings) or {}) if path.exists() else {}


class JsonObject:
    """One JSON object of a file, by key; null counts as missing.

    A value of the wrong kind is a fault that names the key, and a stand-in goes on in its
    place so that the rest is looked at as well.
    """

    def __init__(self, file: Path, raw: dict[str, Any], findings: Findings, prefix: str = ""):
        self.file = file
        self.raw = raw
        self.findings = findings
        self._prefix = prefix

    def fault(self, key: str, problem: str, right: str | None = None) -> None:
        """A fault of the value at `key`."""
        self.findings.fault(self.file, self._name(key), problem, right)

    def note(self, key: str, problem: str, right: str | None = None) -> None:
        """Something worth knowing about the value at `key`."""
        self.findings.note(self.file, self._name(key), problem, right)

    def count(
        self, key: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT
    ) -> int:
        """A whole number; a missing one is a fault unless there is a default."""
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
        """A finite number above a bound; a missing one is a fault unless there is a default."""
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
        """A finite number, 0 or above."""
        return 0.0 if self.raw.get(key) == 0 else self.number(key, default, most=most)

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or None where there is none."""
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.fault(key, self._shown(key), "true or false")
            return default
        return default if value is None else value

    def only(self, key: str, right: object, default: object = None) -> None:
        """The one value that is computed; a missing one means `default`."""
        value = self.raw.get(key)
        if (default if value is None else value) != right:
            self.fault(key, self._shown(key), repr(right))

    def nothing_but(self, known: Set[str]) -> None:
        """A fault for each key that is not known."""
        for key, value in self.raw.items():
            if key not in known and value is not None:
                self.fault(key, shown(value), "no such key: what it changes is not known")

    def child(self, key: str) -> JsonObject | None:
        """The object at `key`; None where there is none, or none that is an object."""
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
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"
