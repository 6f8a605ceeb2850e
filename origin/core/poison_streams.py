"""Finds poison streams, which kill every worker that generates them, by bisection.

The cause of a worker's death may be any run that the worker had begun and that had no output yet.
Most deaths have another cause, so at first all of these streams continue together on other workers.
A stream that is a possible cause of several deaths in a row becomes a suspect. Suspects are split
into two halves, which are tried one after the other; a half whose worker dies is split again. So
after about log2(n) deaths, where n is the number of suspects, the poison stream is alone on its
worker, and only such a stream is blamed.

Other streams do not wait for suspects. Suspects are placed last, on a worker that has no other
suspects, once the streams that it took over from other workers have output.

All rules here are functions of values: the core keeps a `Suspicion` with each stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

TOGETHER_DEATHS = 2
"""Number of deaths in a row after which streams are still tried together; the next one splits
them."""

Worker = TypeVar("Worker")


@dataclass(slots=True, eq=False)
class Suspicion:
    """The grounds for suspecting that one stream kills workers.

    Attributes:
        begun: True if its worker has begun to generate it.
        proven: True if it has output on this worker, so it does not kill workers.
        retried: True if it was on another worker before.
        deaths: Number of workers in a row that had begun it and died before it had output.
        blamed: Number of those deaths for which no other stream can be the cause.
        group: Number of the group of suspects that it is tried with; None if it is no suspect.
        last_output: Index of the last frame of its log that is no notice when it was last begun.
    """

    begun: bool = False
    proven: bool = False
    retried: bool = False
    deaths: int = 0
    blamed: int = 0
    group: int | None = None
    last_output: int = -1

    @property
    def is_grave(self) -> bool:
        """Return True if the stream has lost a worker or a run since it last had output."""
        return self.deaths > 0 or self.blamed > 0

    def place(self, *, retried: bool) -> None:
        """Note that the stream is assigned to a worker; `retried`: another worker had it before."""
        self.begun = self.proven = False
        self.retried = retried

    def prove(self) -> None:
        """Note that the stream has output, so it did not kill its worker."""
        self.proven = True
        self._clear()

    def go_on(self, last_output: int) -> None:
        """Note that a worker is to continue the stream after its output up to this index.

        If the log has grown since, the stream did not kill its last worker, here or elsewhere.
        """
        if last_output != self.last_output:
            self.last_output = last_output
            self._clear()

    def _clear(self) -> None:
        self.deaths = self.blamed = 0
        self.group = None


def judge(standings: Sequence[Suspicion], groups: Iterator[int]) -> list[Suspicion]:
    """Count a worker's death for its streams, make suspects of them, and return those to blame.

    standings: The `Suspicion` of each stream of the dead worker. groups: Yields a new number for
    each group of suspects.
    """
    begun = [each for each in standings if each.begun and not each.proven]
    tried: dict[int | None, list[Suspicion]] = {}
    for each in begun:
        each.deaths += 1
        if each.group is not None or each.deaths > TOGETHER_DEATHS:
            tried.setdefault(each.group, []).append(each)
    for some in tried.values():
        middle = (len(some) + 1) // 2
        for half in (some[:middle], some[middle:]):
            number = next(groups)
            for each in half:
                each.group = number
    alone = [some[0] for group, some in tried.items() if group is not None and len(some) == 1]
    return begun if len(begun) == 1 else alone


def worker_for(standing: Suspicion, company: Mapping[Worker, Sequence[Suspicion]]) -> Worker | None:
    """Return the worker to which a waiting stream is assigned now, or None if it must wait.

    `standing` is the suspicion against the stream, and `company` has those against the streams on
    each worker. Workers without suspects come first, and among them the one with the fewest
    streams.
    """
    allowed = list(company)
    if standing.group is not None:
        with_it = [one for one, runs in company.items() if _tries(runs, standing.group)]
        allowed = with_it or [one for one, runs in company.items() if _is_settled(runs)]
    return min(allowed, key=lambda one: (_tries_any(company[one]), len(company[one])), default=None)


def _tries(runs: Sequence[Suspicion], group: int) -> bool:
    return any(run.group == group for run in runs)


def _tries_any(runs: Sequence[Suspicion]) -> bool:
    return any(run.group is not None for run in runs)


def _is_settled(runs: Sequence[Suspicion]) -> bool:
    """Return True if suspects may be tried on the worker of these runs.

    There must be no suspect among them, and every run that was retried must have output. New
    streams are not waited for, or suspects might wait for ever on a busy origin.
    """
    if not runs:
        return True
    unproven = (run for run in runs if run.begun and run.retried and not run.proven)
    return not _tries_any(runs) and any(run.proven for run in runs) and not any(unproven)
