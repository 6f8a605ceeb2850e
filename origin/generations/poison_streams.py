"""Which stream kills workers: who is tried again with whom after a worker's death.

A worker may have died of any run that it had begun and that had made nothing on it. Most
deaths have another cause, so at first all of these go on together. Those that a few deaths in a
row found so are suspects: the two halves of them are tried one after the other, and of the
half that dies the halves again. So a stream that kills workers stands alone after about as many
deaths as its first company's number has binary digits; only such a stream is blamed.

Nobody waits for suspects: it is they who are handed over last, to a worker that tries
no others, when the streams that it took over with them have made something.

Plain rules over values: `origin.generations.runs` keeps a standing with each stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

TOGETHER_DEATHS = 2
"""Those that were begun at so many deaths in a row are still tried all together."""

Slot = TypeVar("Slot")


@dataclass(slots=True, eq=False)
class Suspicion:
    """What is known of one stream: on its worker, and from the deaths of those before.

    begun: its worker is at work on it. proven: it has made something there. retried: another
    worker had it before. deaths: of workers in a row that had begun it and got nothing out of
    it; blamed: of those, how often it was the only one that it could be. `group`: the number of
    the suspects that it is tried with, if it is one.
    """

    begun: bool = False
    proven: bool = False
    retried: bool = False
    deaths: int = 0
    blamed: int = 0
    group: int | None = None

    def place(self, *, retried: bool) -> None:
        self.begun = self.proven = False
        self.retried = retried

    def prove(self) -> None:
        """It has made something, so it did not kill its worker."""
        self.proven = True
        self.deaths = self.blamed = 0
        self.group = None


def judge(standings: Sequence[Suspicion], groups: Iterator[int]) -> list[Suspicion]:
    """A worker has died with these; gives those to blame, and makes suspects of others.

    `groups` gives numbers that were not used before.
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


def slot_for(standing: Suspicion, company: Mapping[Slot, Sequence[Suspicion]]) -> Slot | None:
    """The slot that a waiting stream goes to now, if any, given the standings of each one's runs.

    That is the one with the fewest runs, and rather one that tries no suspects.
    """
    allowed = list(company)
    if standing.group is not None:
        with_it = [slot for slot, runs in company.items() if _tries(runs, standing.group)]
        allowed = with_it or [slot for slot, runs in company.items() if _is_settled(runs)]
    return min(
        allowed, key=lambda slot: (_tries_any(company[slot]), len(company[slot])), default=None
    )


def _tries(runs: Sequence[Suspicion], group: int) -> bool:
    return any(run.group == group for run in runs)


def _tries_any(runs: Sequence[Suspicion]) -> bool:
    return any(run.group is not None for run in runs)


def _is_settled(runs: Sequence[Suspicion]) -> bool:
    """Whether suspects may be tried beside these runs: a death would throw none of them back.

    Newcomers do not count, or suspects would wait for ever where many come.
    """
    if not runs:
        return True
    unproven = (run for run in runs if run.begun and run.retried and not run.proven)
    return not _tries_any(runs) and any(run.proven for run in runs) and not any(unproven)
