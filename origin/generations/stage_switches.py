"""Decides which stages of a pipeline a request may switch, and which it skips; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import StageSwitch
from tailrace.ledger.validation import closest_name

Stages = Mapping[str, bool]
"""The stages of a pipeline by name, each with True if it is optional; empty for other models."""


def skipped_stages(switches: Sequence[StageSwitch], stages: Stages, model: str) -> tuple[str, ...]:
    """Return the names of the stages that a request to `model` switches off.

    Raises:
        CallerError: A switch names a stage that `model` does not have, or a required one.
    """
    check_switches(switches, stages, model)
    last = {switch.stage: switch.on for switch in switches}
    return tuple(stage for stage, on in last.items() if not on)


def check_switches(switches: Iterable[StageSwitch], stages: Stages, model: str) -> None:
    """Check that a client may switch these stages of `model`.

    Raises:
        CallerError: A switch names a stage that `model` does not have, or a required one.
    """
    for switch in switches:
        _check(switch.stage, stages, model)


def _check(stage: str, stages: Stages, model: str) -> None:
    field = f"stages.{stage}"
    if not stages:
        raise CallerError(
            f"the model {model!r} is not a pipeline", field=field, hint="leave `stages` out"
        )
    if stage not in stages:
        closest = closest_name(stage, stages)
        raise CallerError(
            f"the pipeline {model!r} has no stage {stage!r}",
            field=field,
            hint=f"did you mean {closest!r}?" if closest else _choice(stages),
        )
    if not stages[stage]:
        raise CallerError(
            "a required stage cannot be switched on or off", field=field, hint=_choice(stages)
        )


def _choice(stages: Stages) -> str:
    """Return a hint that lists the stages which can be switched."""
    optional = [repr(stage) for stage, is_optional in stages.items() if is_optional]
    if not optional:
        return "leave `stages` out: no stage of this pipeline is optional"
    return f"the optional stages are {', '.join(optional)}"
