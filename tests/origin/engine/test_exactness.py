"""200 random (request, batch, cut) triples: what a reader gets never depends on the last two."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from kernels.kv_cache import KvCache
from kernels.shapes import Family
from origin.engine.drafts import PromptLookup
from origin.engine.engine import Engine
from origin.engine.generation import Surroundings
from origin.models.cpu_model import load
from origin.scheduler.limits import Limits
from tests.origin.engine.exact_trials import draw_trial, frames_alone, frames_cut
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

TRIALS = 67  # of each family: 201 in all
NARROW_PAGES = 5
SHAPES = {
    Family.BITNET: Shape(),
    Family.LLAMA: Shape(family=Family.LLAMA, heads=6, kv_heads=2, head_dim=16, tied_head=False),
    Family.QWEN3: Shape(family=Family.QWEN3, heads=3, kv_heads=1, head_dim=32),
}


class Engines:
    """Makes engines of one checkpoint that differ in all that must not matter, and keeps them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, random: Random) -> None:
        roomy = load(folder)
        config = roomy.config
        page = KvCache.page_bytes(config.layers, config.kv_heads, config.head_dim)
        self.models = [roomy, load(folder, kv_bytes=NARROW_PAGES * page)]
        self.made: list[Engine] = []
        self._tokenizer = tokenizer
        self._random = random
        self._now_s = 0.0

    def _clock_s(self) -> float:
        """Steps last between nothing and twice as long as they should."""
        self._now_s += self._random.random() * 0.1
        return self._now_s

    def plain(self) -> Engine:
        return Engine.of(self.models[0], self._tokenizer)

    def any(self) -> Engine:
        """Few pages or many, with guesses or without, with narrow steps or wide ones."""
        model = self._random.choices(self.models, (1, 2))[0]
        config = model.config
        drafter = self._random.choice((None, PromptLookup()))
        around = Surroundings(
            self._tokenizer, config.eos_ids, config.context, config.vocab, drafter=drafter
        )
        limits = Limits(step_tokens_least=65, step_tokens_most=self._random.choice((65, 256)))
        engine = Engine(model, around, limits, self._clock_s)
        self.made.append(engine)
        return engine


@pytest.mark.parametrize("family", list(Family))
def test_a_cut_run_in_any_company_gives_what_it_gives_alone(
    tmp_path: Path, tokenizer: Tokenizer, family: Family
) -> None:
    random = Random(int.from_bytes(family.value.encode()))
    engines = Engines(write_checkpoint(tmp_path, SHAPES[family]), tokenizer, random)
    for number in range(TRIALS):
        trial = draw_trial(random, engines.models[0].config.vocab)
        whole = frames_alone(engines.plain, trial)
        assert frames_cut(engines.any, trial, len(whole)) == whole, f"trial {number}: {trial}"
    loads = [engine.load() for engine in engines.made]
    assert sum(load_now.preemptions for load_now in loads) > 0
    assert sum(load_now.reused_tokens for load_now in loads) > 0
    assert sum(load_now.accepted for load_now in loads) > 0
