"""An engine that reads a step's tokens one step late gives what one gives that waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tailrace.ledger.frame import FinishReason
from tailrace.origin.engine.engine import Engine
from tailrace.origin.engine.generation import NOT_A_NUMBER, ModelContext
from tailrace.origin.models.cpu_model import CpuModel
from tailrace.origin.models.model import Draw, Piece
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.workers.worker_frame import Emission
from tests.origin.engine.late_device import LateDevice, LateLaunch
from tests.origin.engine.runs import end_of, generated, make_run, run_all, text_of
from tests.origin.engine.test_engine import Watched

SAMPLED: dict[str, Any] = {"temperature": 1.5, "top_k": 120, "ignore_eos": True, "max_tokens": 30}
MIXED: dict[int, dict[str, Any]] = {
    1: {"seed": 1},
    2: {"seed": 2, "presence_penalty": 0.5, "max_tokens": 12},
    3: {"seed": 3, "logprobs": 2, "max_tokens": 9},
    4: {"seed": 4, "stop": ("e",)},
    5: {"seed": 5, "max_tokens": 20},
    6: {"seed": 6, "ignore_eos": False, "prompt_ids": tuple(range(1, 150))},
}


class Stage:
    """Two engines with one model; one of them reads its device's results late."""

    def __init__(self, model: CpuModel, tokenizer: Tokenizer) -> None:
        config = model.config
        self.around = ModelContext(tokenizer, config.eos_ids, config.context, config.vocab)
        self.waits_for = model
        self.waits = Engine(model, self.around)
        self.device = LateDevice(model)
        self.late = Engine(model, self.around, device=self.device)


@pytest.fixture
def stage(model: CpuModel, tokenizer: Tokenizer) -> Stage:
    return Stage(model, tokenizer)


def rest_of(engine: Engine) -> list[Emission]:
    emissions: list[Emission] = []
    while not engine.idle:
        emissions += engine.step()
    return emissions


def test_the_next_step_is_launched_before_the_last_is_read(stage: Stage) -> None:
    run_all(stage.late, {1: make_run(**SAMPLED)})
    # The first follows a prompt; all others, and one for nothing, the token before.
    assert stage.device.ahead == SAMPLED["max_tokens"] - 2


def test_a_run_with_a_penalty_has_every_step_waited_for_and_one_with_scores_has_not(
    stage: Stage,
) -> None:
    run_all(stage.late, {1: make_run(**SAMPLED | MIXED[2])})
    assert stage.device.ahead == 0
    run_all(stage.late, {1: make_run(**SAMPLED | MIXED[3])})
    assert stage.device.ahead == MIXED[3]["max_tokens"] - 2


def test_a_penalised_draw_names_the_ids_that_its_counts_have(stage: Stage) -> None:
    device = Noting(stage.waits_for)
    engine = Engine(stage.waits_for, stage.around, device=device)
    run_all(engine, {1: make_run(**SAMPLED | MIXED[2])})
    assert [len(ids) for ids in device.generated] == [*range(MIXED[2]["max_tokens"])]
    assert len(set(map(id, device.lists))) == 1


@pytest.mark.parametrize("first_use", [True, False])
def test_a_step_that_was_slow_for_once_does_not_lower_the_limits(
    stage: Stage, first_use: bool
) -> None:
    """A capture stalls the step that is launched, and the one before it, which is then read."""
    clock = Clock()
    device = Stalling(stage.waits_for, clock)
    limits = Limits(step_seconds=0.05)
    engine = Engine(stage.waits_for, stage.around, limits, clock, device=device)
    engine.add(1, make_run(**SAMPLED | {"max_tokens": 200}))
    while engine.load().tokens < 4:
        engine.step()
    for number in range(2, 20):  # rows are wanted, and steps are quick: the limits rise
        engine.add(number, make_run(**SAMPLED | {"max_tokens": 200}))
    for _ in range(40):
        engine.step()
    before = engine.load().row_limit
    assert before > limits.step_rows_least
    device.stall(first_use)
    engine.step()
    engine.step()
    assert (engine.load().row_limit >= before) is first_use


def test_runs_of_all_kinds_beside_one_another_give_the_same(stage: Stage) -> None:
    runs = {number: make_run(**SAMPLED | fields) for number, fields in MIXED.items()}
    assert run_all(stage.late, runs) == run_all(stage.waits, runs)
    assert stage.device.ahead > 0
    load = stage.late.load()
    assert load.pages_free == load.pages


def test_a_run_that_is_cancelled_makes_nothing_more_and_disturbs_no_other(stage: Stage) -> None:
    expected = run_all(stage.waits, {2: make_run(**SAMPLED, seed=2)})[2]
    for number in (1, 2):
        stage.late.add(number, make_run(**SAMPLED, seed=number))
    emissions = [emission for _ in range(8) for emission in stage.late.step()]
    stage.late.cancel(1)
    stage.late.add(3, make_run(**SAMPLED, seed=2))
    emissions += rest_of(stage.late)
    assert [each for each in emissions if each.run == 2] == expected
    assert [each.frame for each in emissions if each.run == 3] == [each.frame for each in expected]
    end = end_of([each for each in emissions if each.run == 1])
    assert end.finish_reason is FinishReason.CANCELLED


def test_the_number_of_a_cancelled_run_may_be_used_at_once(stage: Stage) -> None:
    expected = run_all(stage.waits, {1: make_run(**SAMPLED, seed=2)})[1]
    stage.late.add(1, make_run(**SAMPLED, seed=1))
    for _ in range(8):
        stage.late.step()
    stage.late.cancel(1)
    stage.late.add(1, make_run(**SAMPLED, seed=2))
    emissions = rest_of(stage.late)
    assert emissions[-len(expected) :] == expected
    assert end_of(emissions[: -len(expected)]).finish_reason is FinishReason.CANCELLED


def test_a_steered_run_goes_on_as_if_every_step_had_been_waited_for(
    stage: Stage, tokenizer: Tokenizer
) -> None:
    steered = tokenizer.encode(" The bear ran.", add_special_tokens=False).ids
    run = make_run(**SAMPLED, seed=9)
    stage.late.add(1, run)
    emissions = [emission for _ in range(8) for emission in stage.late.step()]
    stage.late.steer(1, steered)
    emissions += rest_of(stage.late)
    ids = ids_of(emissions)
    before = generated(emissions)["steered"][0].start
    stage.waits.add(1, run)
    expected: list[Emission] = []
    while stage.waits.load().tokens < before:
        expected += stage.waits.step()
    stage.waits.steer(1, steered)
    expected += rest_of(stage.waits)
    assert before == 8 and ids == ids_of(expected)
    assert text_of(emissions) == text_of(expected)


class Noting(LateDevice):
    """Notes the ids of each penalised draw, when it is launched."""

    def __init__(self, model: CpuModel) -> None:
        super().__init__(model)
        self.generated: list[list[int]] = []
        self.lists: list[Sequence[int]] = []

    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> LateLaunch:
        for draw in draws:
            assert draw.generated is not None and draw.counts is not None
            assert [*draw.counts.nonzero().flatten().tolist()] == sorted({*draw.generated})
            self.lists.append(draw.generated)
            self.generated.append([*draw.generated])
        return super().launch(pieces, rows, draws)


class Clock:
    """A clock that passes when the test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Stalling(LateDevice):
    """Each launch takes a millisecond, but one takes a second."""

    def __init__(self, model: CpuModel, clock: Clock) -> None:
        super().__init__(model)
        self._clock = clock
        self._stalls: list[bool] = []

    def stall(self, first_use: bool) -> None:
        """Let the next launch stall, and say whether that was a first use."""
        self._stalls.append(first_use)

    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> LateLaunch:
        launched = super().launch(pieces, rows, draws)
        self._clock.now_s += 1.0 if self._stalls else 0.001
        launched.first_use = bool(self._stalls and self._stalls.pop())
        return launched


def ids_of(emissions: Sequence[Emission]) -> list[int]:
    return [token for emission in emissions for token in emission.ids]


class Spoilt(Watched):
    """A model whose hidden rows are NaN after this token."""

    def __init__(self, model: CpuModel, token: int) -> None:
        super().__init__(model)
        self._token = token

    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        hidden = super().forward(pieces).clone()
        ids = [token for piece in pieces for token in piece.ids]
        hidden[[token == self._token for token in ids]] = torch.nan
        return hidden


def test_a_row_that_is_no_number_ends_its_run_alone(stage: Stage, model: CpuModel) -> None:
    runs = {number: make_run(**SAMPLED, seed=number) for number in (1, 2)}
    expected = run_all(stage.waits, runs)
    first, second = ids_of(expected[1]), ids_of(expected[2])
    token = next(token for token in first[5:] if token not in second)
    device = LateDevice(Spoilt(model, token))
    found = run_all(Engine(model, stage.around, device=device), runs)
    end = end_of(found[1])
    assert (end.finish_reason, end.message) == (FinishReason.FAILED, NOT_A_NUMBER)
    assert ids_of(found[1]) == first[: first.index(token) + 1]
    assert found[2] == expected[2]
