"""241 random (request, batch, cut) triples: what a reader gets never depends on the last two."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from tailrace.kernels.attention.paged_kv import page_bytes
from tailrace.kernels.shapes import Family
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models.cpu_model import KV_DTYPES, load
from tests.origin.engine.exact_trials import Engines, draw_trial, frames_alone, frames_cut
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

TRIALS = 67  # for each family: 201 in all
QUANTISED_TRIALS = 20
NARROW_PAGES = 5
SHAPES = {
    Family.BITNET: Shape(),
    Family.LLAMA: Shape(family=Family.LLAMA, heads=6, kv_heads=2, head_dim=16, tied_head=False),
    Family.QWEN3: Shape(family=Family.QWEN3, heads=3, kv_heads=1, head_dim=32),
}


QUANTISED = Shape(family=Family.LLAMA, hidden=128, ffn=128, tied_head=False)
CASES = {
    **{family.value: (SHAPES[family], AS_STORED, TRIALS) for family in Family},
    "int8": (QUANTISED, Formats("int8", "int8", "int8"), QUANTISED_TRIALS),
    "int4": (QUANTISED, Formats("int4", "fp8"), QUANTISED_TRIALS),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cut_run_in_any_company_gives_what_it_gives_alone(
    tmp_path: Path, tokenizer: Tokenizer, case: str
) -> None:
    shape, formats, trials = CASES[case]
    random = Random(int.from_bytes(case.encode()))
    folder = write_checkpoint(tmp_path, shape)
    roomy = load(folder, formats=formats)
    config, kv_dtype = roomy.config, KV_DTYPES[formats.kv_cache]
    page = page_bytes(config.layers, config.kv_heads, config.head_dim, kv_dtype)
    narrow = load(folder, kv_bytes=NARROW_PAGES * page, formats=formats)
    engines = Engines([roomy, narrow], tokenizer, random)
    for number in range(trials):
        trial = draw_trial(random, config.vocab)
        whole = frames_alone(engines.plain, trial)
        assert frames_cut(engines.any, trial, len(whole)) == whole, f"trial {number}: {trial}"
    loads = [engine.load() for engine in engines.made]
    assert sum(load_now.preemptions for load_now in loads) > 0
    assert sum(load_now.reused_tokens for load_now in loads) > 0
    assert sum(load_now.accepted for load_now in loads) > 0
    assert sum(device.ahead for device in engines.devices) > 0
