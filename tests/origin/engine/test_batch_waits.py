"""How long runs wait for the batch: what counts as a wait, and that an engine measures it."""

from __future__ import annotations

from itertools import count

from tokenizers import Tokenizer

from tailrace.origin.engine.batch_waits import LEAST_WAIT_S, BatchWaits
from tailrace.origin.engine.engine import Engine
from tailrace.origin.models.cpu_model import CpuModel
from tailrace.origin.scheduler.limits import Limits
from tests.origin.engine.runs import engine_of, make_run


def test_a_run_waits_from_its_arrival_and_while_steps_leave_it_out() -> None:
    waits = BatchWaits()
    waits.added(1, 10.0)
    waits.added(2, 10.5)
    assert waits.so_far(11.0) == {1: 1.0, 2: 0.5}
    waits.step([1], 12.0)
    assert waits.so_far(14.0) == {1: 2.0, 2: 3.5}
    waits.step([1, 2], 15.0)
    waits.step([2], 16.0)  # run 1 is preempted
    waits.step([2], 17.0)
    assert waits.so_far(18.0) == {1: 4.0, 2: 4.5}
    waits.step([1], 19.0)
    waits.removed(1)
    assert waits.so_far(20.0) == {2: 5.5}
    assert waits.take_ended() == {1: 5.0}
    assert waits.take_ended() == {}


def test_short_waits_are_not_reported() -> None:
    waits = BatchWaits()
    waits.added(1, 0.0)
    waits.step([1], LEAST_WAIT_S / 2)
    assert waits.so_far(9.0) == {}
    waits.removed(1)
    assert waits.take_ended() == {}


def test_a_run_whose_last_token_is_being_drawn_does_not_wait() -> None:
    waits = BatchWaits()
    waits.added(1, 0.0)
    waits.added(2, 0.0)
    waits.step([1, 2], 2.0)
    waits.step([2], 3.0)
    waits.removed(1)
    assert waits.take_ended() == {1: 2.0}


def test_the_number_of_a_run_can_be_used_again() -> None:
    waits = BatchWaits()
    waits.added(1, 0.0)
    waits.step([1], 1.0)
    waits.removed(1)
    waits.added(1, 2.0)
    assert waits.so_far(2.5) == {1: 0.5}
    waits.step([1], 3.0)
    waits.removed(1)
    assert waits.take_ended() == {1: 1.0}


def test_a_run_that_waits_for_the_only_place_is_measured(
    model: CpuModel, tokenizer: Tokenizer
) -> None:
    around = engine_of(model, tokenizer)._model_context
    ticks = count()
    engine = Engine(model, around, Limits(running=1), clock_s=lambda: float(next(ticks)))
    engine.add(1, make_run(max_tokens=5, ignore_eos=True))
    engine.add(2, make_run(max_tokens=5, ignore_eos=True))
    ended: dict[int, float] = {}
    while not engine.idle:
        waiting = 2 not in ended
        engine.step()
        ended |= engine.take_ended_waits()
        if waiting and 1 in ended and 2 not in ended:
            assert 1 not in engine.waits()
    assert ended[2] > 10 > ended[1] > 0
    assert engine.waits() == {}
