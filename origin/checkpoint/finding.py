"""What is wrong with a checkpoint: found one by one, told all at once or as one refusal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ledger.errors import ModelError


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
