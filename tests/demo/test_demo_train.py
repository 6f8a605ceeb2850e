"""Training of the demo model: batches, resumption, export."""

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from demo.corpus import ASSISTANT, END, USER, Part, documents
from demo.export import tensors
from demo.net import Net, Shape
from demo.tokens import IGNORED, encode, windows
from demo.train import SAVE_EVERY_S, Batch, Recipe, Training, batches, train
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.models.cpu_model import load
from tailrace.origin.models.tensors import read_tensors
from tests.origin.models.sequences import prompt_logits

TINY = Shape(vocab=320, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, context=128)
FEW_STEPS = Recipe(
    minutes=None,
    steps=30,
    tokenizer_documents=500,
    tokens_per_step=512,
    warmup_steps=5,
    falls_from=0.9,
)


class Trained:
    """One short run, shared by the tests that only read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.run = train(directory, TINY, FEW_STEPS, report=self.lines.append)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def test_a_few_steps_of_training_lower_the_loss(trained: Trained) -> None:
    losses = trained.run.losses
    assert len(losses) == FEW_STEPS.steps
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_run_reports_its_speed_and_the_time_left(trained: Trained) -> None:
    assert "parameters" in trained.lines[0]
    assert "tokens/s" in trained.lines[-1] and "0 s left" in trained.lines[-1]


def test_the_exported_checkpoint_has_exactly_the_tensors_of_its_config(trained: Trained) -> None:
    config = read_config(trained.directory)
    assert (config.vocab, config.context, config.kv_heads) == (TINY.vocab, TINY.context, 1)
    assert config.eos_ids == {trained.tokenizer.token_to_id(END)}
    assert read_tensors(trained.directory, config).keys() == tensors(trained.run.net).keys()


def test_the_served_model_computes_what_was_trained(trained: Trained) -> None:
    ids = trained.tokenizer.encode("Once upon a time there was a fox").ids
    with torch.no_grad():
        expected = trained.run.net(torch.tensor([ids]))[0]
    served = prompt_logits(load(trained.directory), ids)
    # An activation at a rounding boundary may fall either way; a wrong export is off by 1.
    torch.testing.assert_close(served, expected, atol=0.05, rtol=0)


def test_the_same_seed_trains_the_same_weights(trained: Trained) -> None:
    recipe = Recipe(minutes=None, steps=2, tokens_per_step=256)
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        net = Net(TINY)
        run = Training(net, recipe, clock=lambda: 0.0, report=lambda line: None)
        for batch in islice(batches(trained.tokenizer, recipe, TINY.context), 2):
            run.step(batch, 0.5)
        nets.append(tensors(net))
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


def test_a_run_bound_by_the_clock_ends_on_time_and_saves_on_the_way() -> None:
    ticks = count(0, 10)
    saves: list[int] = []
    recipe = Recipe(minutes=2 * SAVE_EVERY_S / 60 + 1)
    run = Training(Net(TINY), recipe, clock=lambda: float(next(ticks)), report=lambda line: None)
    run.run(repeated_batch(), lambda: saves.append(run.steps))
    assert 0 < run.steps < 60
    assert len(saves) == 3 and saves[-1] == run.steps


def repeated_batch() -> Iterator[Batch]:
    ids = torch.arange(32).reshape(1, 32)
    while True:
        yield ids, ids


def test_the_rate_rises_over_the_first_steps_stays_and_falls_to_zero() -> None:
    recipe = Recipe(minutes=1, warmup_steps=10, peak_rate=1.0, falls_from=0.5)
    assert recipe.rate(0, 0.0) == pytest.approx(0.1)
    assert recipe.rate(9, 0.1) == recipe.rate(500, 0.5) == 1.0
    assert recipe.rate(900, 0.75) == pytest.approx(0.5)
    assert recipe.rate(999, 1.0) == recipe.rate(999, 1.1) == 0.0


@pytest.mark.parametrize(("minutes", "steps"), [(None, None), (1.0, 10)])
def test_a_recipe_is_bound_by_time_or_by_steps(minutes: float | None, steps: int | None) -> None:
    with pytest.raises(ValueError, match="either minutes or steps"):
        Recipe(minutes=minutes, steps=steps)


def test_what_a_user_says_is_not_learnt(trained: Trained) -> None:
    asked = Part(f"{USER}Hello!{ASSISTANT}", False)
    told = Part(f"Hi there!{END}", True)
    ids, labels = encode(trained.tokenizer, (asked, told))
    given = len(trained.tokenizer.encode(asked.text).ids)
    assert labels == [IGNORED] * given + ids[given:]
    assert trained.tokenizer.decode(ids, skip_special_tokens=False) == asked.text + told.text


def test_a_window_begins_where_a_document_begins(trained: Trained) -> None:
    corpus = list(islice(documents(2), 40))
    starts = {tuple(encode(trained.tokenizer, document)[0][:12]) for document in corpus}
    cut = list(windows(trained.tokenizer, corpus, 64))
    assert len(cut) > 10
    for ids, labels in cut:
        assert len(ids) == len(labels) == 64
        assert tuple(ids[:12]) in starts


def test_numbers_are_written_digit_by_digit(trained: Trained) -> None:
    tokens = [token.lstrip("Ġ") for token in trained.tokenizer.encode("27 + 135").tokens]
    assert [token for token in tokens if token not in ("", "+")] == ["2", "7", "1", "3", "5"]


def test_any_text_survives_the_tokenizer(trained: Trained) -> None:
    for said in ("Zoé 🦊 – naïve", "  two  spaces\n\n", "日本語", "\x00\x7f", "12.5%"):
        assert trained.tokenizer.decode(trained.tokenizer.encode(said).ids) == said
