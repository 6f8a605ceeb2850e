"""Poison streams: one that kills workers is found in few deaths, whatever the others do."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from tailrace.origin.core.poison_streams import TOGETHER_DEATHS, Suspicion, judge, worker_for
from tailrace.origin.core.streams import MAX_DEATHS


class Play:
    """Workers that die as soon as they have begun the stream that kills.

    Before that they get something out of `quick` of those that are begun beside it, at most.
    """

    def __init__(self, streams: int, killer: int, workers: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.waiting = [Suspicion() for _ in range(streams)]
        self.killer = self.waiting[killer]
        self.workers: list[list[Suspicion]] = [[] for _ in range(workers)]
        self.groups = itertools.count()
        self.deaths = 0
        self.most_blamed = 0  # of the others
        self.company = 0  # of the killer, itself included, when it became a suspect

    def assign(self) -> None:
        company = dict(enumerate(self.workers))
        for standing in sorted(self.waiting, key=lambda each: each.group is not None):
            slot = worker_for(standing, company)
            if slot is not None:
                self.waiting.remove(standing)
                standing.place(retried=True)
                self.workers[slot].append(standing)

    def work(self, quick: int, newcomers: int) -> None:
        """One worker goes on with what it has, and dies if the killer is among it."""
        self.waiting += [Suspicion() for _ in range(newcomers)]
        self.assign()
        runs = self.random.choice(self.workers)
        others = [run for run in runs if run is not self.killer]
        for run in runs:
            run.begun = True
        if self.killer in runs:
            for run in others[:quick]:
                run.prove()
            self.die(runs)
        else:
            for run in runs:
                run.prove()

    def die(self, runs: list[Suspicion]) -> None:
        self.deaths += 1
        if self.killer.group is None:
            self.company = len(runs)
        for blamed in judge(runs, self.groups):
            blamed.blamed += 1
        self.most_blamed = max(
            [self.most_blamed, *(r.blamed for r in runs if r is not self.killer)]
        )
        self.waiting += runs
        runs.clear()


@given(
    streams=st.integers(1, 300),
    data=st.data(),
    workers=st.integers(1, 3),
    quick=st.integers(0, 3),
    newcomers=st.integers(0, 3),
)
def test_a_killer_is_found_in_logarithmically_many_deaths_and_nobody_else_is_ended(
    streams: int, data: st.DataObject, workers: int, quick: int, newcomers: int
) -> None:
    killer = data.draw(st.integers(0, streams - 1))
    play = Play(streams, killer, workers, data.draw(st.integers(0, 1 << 16)))
    for _ in range(100 * workers):
        play.work(quick, newcomers)
        if play.killer.blamed >= MAX_DEATHS:
            break
    assert play.killer.blamed >= MAX_DEATHS
    assert play.deaths <= TOGETHER_DEATHS + play.company.bit_length() + MAX_DEATHS
    assert play.most_blamed < MAX_DEATHS
    play.waiting = [each for each in play.waiting if each is not play.killer]
    for _ in range(100 * workers):
        play.work(quick, 0)
    assert all(run.proven for runs in play.workers for run in runs) and not play.waiting


def test_all_are_tried_together_after_the_first_deaths() -> None:
    streams = [Suspicion() for _ in range(24)]
    for deaths in (1, 2):  # two in a row have another cause as a rule
        for each in streams:
            each.place(retried=deaths > 1)
            each.begun = True
        assert judge(streams, itertools.count()) == []
        assert {each.group for each in streams} == {None}
        busy = {"one": [Suspicion(begun=True, retried=True)]}
        assert {worker_for(each, busy) for each in streams} == {"one"}


def test_suspects_are_not_thrown_back_on_those_that_their_worker_took_over() -> None:
    suspect = Suspicion(group=1)
    proven, newcomer = Suspicion(proven=True), Suspicion(begun=True)
    taken_over = Suspicion(begun=True, retried=True)
    assert worker_for(suspect, {"one": [proven, newcomer]}) == "one"
    assert worker_for(suspect, {"one": [proven, taken_over]}) is None
    assert worker_for(suspect, {"one": [taken_over]}) is None
    assert worker_for(suspect, {"one": [proven, Suspicion(group=2)]}) is None
    assert worker_for(suspect, {"one": [taken_over, Suspicion(group=1)]}) == "one"


def test_newcomers_go_where_no_suspect_is_tried() -> None:
    company = {"one": [Suspicion(group=1)], "two": [Suspicion(proven=True)] * 9}
    assert worker_for(Suspicion(), company) == "two"
    assert worker_for(Suspicion(), {"one": company["one"]}) == "one"
