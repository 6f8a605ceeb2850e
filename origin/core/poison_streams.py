"""Which stream kills workers: which streams are tried together after a worker's death.

A worker may have died of any run that it had begun and that had made nothing on it. Most deaths
have another cause, so at first all of these go on together. Streams that a few deaths in a row
found in that position are suspects: they are tried in two halves, one after the other, and a half
whose worker dies is halved again. So a stream that kills workers stands alone after about log2(n)
deaths, where n is the number of its first companions; only such a stream is blamed.

Other streams do not wait for suspects. Suspects are placed last, on a worker that tries no others,
once the streams that it took over have made something.

Plain rules over values: the core keeps a `Suspicion` with each stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

TOGETHER_DEATHS = 2
"""Maximum number of deaths in a row after which streams are still tried all together."""

Worker = TypeVar("Worker")


@dataclass(slots=True, eq=False)
class Suspicion:
    """Why one stream may kill workers, or does not.

    `begun`: its worker is at work on it. `proven`: it has made something there. `retried`: another
    worker had it before. `deaths` counts workers in a row that had begun it and died before it made
    anything; `blamed` those of them that can have died of nothing else. `group` is the number of
    the suspects that it is tried with, if it is one.
    """

    begun: bool = False
    proven: bool = False
    retried: bool = False
    deaths: int = 0
    blamed: int = 0
    group: int | None = None

    def place(self, *, retried: bool) -> None:
        """Note that another worker gets it."""
        self.begun = self.proven = False
        self.retried = retried

    def prove(self) -> None:
        """Note that it has made something, so it did not kill its worker."""
        self.proven = True
        self.deaths = self.blamed = 0
        self.group = None


def judge(standings: Sequence[Suspicion], groups: Iterator[int]) -> list[Suspicion]:
    """Make suspects of streams whose worker has died, and return those to blame for it.

    `groups` yields numbers that were not used before.
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
    """Return the worker that a waiting stream goes to now, or None.

    `company` are the streams that are on each worker. It is the worker with the
    fewest of them, and rather one that tries no suspects.
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
    """Return True if suspects may be tried beside these runs: a death would set none of them back.

    New streams do not count, or suspects would wait for ever where many come.
    """
    if not runs:
        return True
    unproven = (run for run in runs if run.begun and run.retried and not run.proven)
    return not _tries_any(runs) and any(run.proven for run in runs) and not any(unproven)
