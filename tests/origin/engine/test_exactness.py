"""200 random (request, batch, cut) triples: what a reader gets never depends on the last two."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from kernels.attention.kv_cache import KvCache
from kernels.shapes import Family
from origin.models.cpu_model import load
from tests.origin.engine.exact_trials import Engines, draw_trial, frames_alone, frames_cut
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

TRIALS = 67  # of each family: 201 in all
NARROW_PAGES = 5
SHAPES = {
    Family.BITNET: Shape(),
    Family.LLAMA: Shape(family=Family.LLAMA, heads=6, kv_heads=2, head_dim=16, tied_head=False),
    Family.QWEN3: Shape(family=Family.QWEN3, heads=3, kv_heads=1, head_dim=32),
}


@pytest.mark.parametrize("family", list(Family))
def test_a_cut_run_in_any_company_gives_what_it_gives_alone(
    tmp_path: Path, tokenizer: Tokenizer, family: Family
) -> None:
    random = Random(int.from_bytes(family.value.encode()))
    folder = write_checkpoint(tmp_path, SHAPES[family])
    roomy = load(folder)
    config = roomy.config
    page = KvCache.page_bytes(config.layers, config.kv_heads, config.head_dim)
    narrow = load(folder, kv_bytes=NARROW_PAGES * page)
    engines = Engines([roomy, narrow], tokenizer, random)
    for number in range(TRIALS):
        trial = draw_trial(random, config.vocab)
        whole = frames_alone(engines.plain, trial)
        assert frames_cut(engines.any, trial, len(whole)) == whole, f"trial {number}: {trial}"
    loads = [engine.load() for engine in engines.made]
    assert sum(load_now.preemptions for load_now in loads) > 0
    assert sum(load_now.reused_tokens for load_now in loads) > 0
    assert sum(load_now.accepted for load_now in loads) > 0
