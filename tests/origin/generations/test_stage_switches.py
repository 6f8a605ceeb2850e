"""Stages of a pipeline that a request switches off, and switches that are refused by name."""

from __future__ import annotations

import pytest

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import StageSwitch
from tailrace.origin.generations.stage_switches import Stages, skipped_stages

STAGES = {"prompts": False, "model": False, "punctuate": True, "group": True}


def test_a_stage_that_is_switched_off_is_skipped() -> None:
    off = StageSwitch("punctuate", False)
    assert skipped_stages([off], STAGES, "captions") == ("punctuate",)
    both = [off, StageSwitch("group", True)]
    assert skipped_stages(both, STAGES, "captions") == ("punctuate",)
    assert skipped_stages([], STAGES, "captions") == ()
    assert skipped_stages([], {}, "demo") == ()


def test_the_last_of_two_switches_counts() -> None:
    switches = [StageSwitch("punctuate", False), StageSwitch("punctuate", True)]
    assert skipped_stages(switches, STAGES, "captions") == ()


@pytest.mark.parametrize(
    ("switch", "stages", "message", "hint"),
    [
        (
            StageSwitch("punctuation", False),
            STAGES,
            "the pipeline 'captions' has no stage 'punctuation'",
            "did you mean 'punctuate'?",
        ),
        (
            StageSwitch("x", True),
            STAGES,
            "the pipeline 'captions' has no stage 'x'",
            "the optional stages are 'punctuate', 'group'",
        ),
        (
            StageSwitch("model", True),
            STAGES,
            "a required stage cannot be switched on or off",
            "the optional stages are 'punctuate', 'group'",
        ),
        (
            StageSwitch("model", False),
            {"model": False},
            "a required stage cannot be switched on or off",
            "leave `stages` out: no stage of this pipeline is optional",
        ),
        (
            StageSwitch("punctuate", False),
            {},
            "the model 'captions' is not a pipeline",
            "leave `stages` out",
        ),
    ],
)
def test_a_switch_is_refused_by_the_name_of_its_stage(
    switch: StageSwitch, stages: Stages, message: str, hint: str
) -> None:
    valid = StageSwitch("group", False) if "group" in stages else switch
    with pytest.raises(CallerError) as caught:
        skipped_stages([valid, switch], stages, "captions")
    refused = caught.value
    assert (refused.message, refused.field, refused.hint) == (
        message,
        f"stages.{switch.stage}",
        hint,
    )
