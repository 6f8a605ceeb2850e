"""The same triples on the kernels: 1,000 on a GPU, a few small ones in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from tailrace.kernels.shapes import Family
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models.gpu_model import load
from tests.origin.engine.exact_trials import (
    Engines,
    Fields,
    Trial,
    draw_trial,
    frames_alone,
    frames_cut,
)
from tests.origin.tiny_checkpoint import KERNEL_SHAPES, Shape, write_checkpoint

GPU_TRIALS = 334  # for each case
INTERPRETED_TRIALS = 1  # for each case; one takes most of a minute
CASES = {
    **{family.value: (KERNEL_SHAPES[family], AS_STORED) for family in Family},
    "quantised": (
        Shape(hidden=128, ffn=128, layers=1, family=Family.LLAMA),
        Formats("int4", "int8", "int8"),
    ),
}

pytestmark = pytest.mark.usefixtures("few_programs")


def small(trial: Trial) -> Trial:
    """Return the same with fewer tokens and less company: a step takes long in the interpreter."""

    def cut(fields: Fields) -> Fields:
        return fields | {
            "prompt_ids": fields["prompt_ids"][:80],
            "max_tokens": min(fields["max_tokens"], 6),
        }

    return replace(
        trial,
        request=cut(trial.request),
        before=tuple(map(cut, trial.before[:1])),
        after=tuple(map(cut, trial.after[:1])),
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_a_cut_run_in_any_company_gives_on_the_kernels_what_it_gives_alone(
    tmp_path: Path, tokenizer: Tokenizer, device: torch.device, case: str
) -> None:
    is_gpu = device.type == "cuda"
    shape, formats = CASES[case]
    random = Random(int.from_bytes(case.encode()))
    folder = write_checkpoint(tmp_path, shape)
    roomy = load(folder, device=device, formats=formats)
    narrow = load(folder, device=device, formats=formats, kv_bytes=1)
    engines = Engines([roomy, narrow], tokenizer, random, lambda model: model)
    for number in range(GPU_TRIALS if is_gpu else INTERPRETED_TRIALS):
        trial = draw_trial(random, roomy.config.vocab)
        trial = trial if is_gpu else small(trial)
        whole = frames_alone(engines.plain, trial)
        assert frames_cut(engines.any, trial, len(whole)) == whole, f"trial {number}: {trial}"
