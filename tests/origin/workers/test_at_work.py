"""The runs that a worker reports as begun: all that may kill it, and no others."""

from __future__ import annotations

from tailrace.origin.workers.worker_frame import AtWork


def test_a_run_is_named_while_it_is_taken_and_from_its_first_step_until_it_makes_something() -> (
    None
):
    said: list[set[int]] = []
    at_work = AtWork(lambda begun: said.append(set(begun.runs)))
    at_work.take(1)
    at_work.take(2)
    at_work.begin((1,))
    at_work.begin((1,))
    at_work.made((1,))
    at_work.take(3)
    at_work.begin((1, 2, 3))
    at_work.made((2,))
    at_work.begin((1, 2, 3))
    assert said == [{1}, {2}, {1}, {3}, {2, 3}, {3}]
