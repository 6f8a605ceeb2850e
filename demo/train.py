"""Train the demo model: `python -m demo.train OUT --minutes 26 --compile`.

One run makes the tokenizer, trains on the endless corpus for a given time or number of
steps, and exports the checkpoint. The learning rate warms up over the first steps, stays
level, then falls linearly to zero; weight decay stops when it begins to fall.

`--compile` needs a C++ compiler; after about two minutes of compilation, training is about 1.3
times as fast.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from demo.corpus import documents
from demo.export import save_checkpoint
from demo.net import Net, Shape
from demo.tokens import IGNORED, save_tokenizer, train_tokenizer, windows

SHORT_WINDOW = 256
REPORT_EVERY_STEPS = 25
SAVE_EVERY_S = 180.0


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run. It ends after `minutes` or after `steps`; the other is None."""

    minutes: float | None = 26.0
    steps: int | None = None
    seed: int = 1
    tokenizer_documents: int = 12_000
    tokens_per_step: int = 2048
    long_every: int = 4
    peak_rate: float = 3e-3
    warmup_steps: int = 60
    falls_from: float = 0.3
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate of a step.

        `step` counts from 0; `progress` is the share of the run that has passed, 0 to 1.
        """
        warm = min(1.0, (step + 1) / self.warmup_steps)
        level = min(1.0, max(0.0, (1 - progress) / (1 - self.falls_from)))
        return self.peak_rate * warm * level


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(tokenizer: Tokenizer, recipe: Recipe, context: int) -> Iterator[Batch]:
    """Yield ids and labels [batch, length]; each `long_every`-th batch has the whole context."""
    streams = {
        length: windows(tokenizer, documents(recipe.seed, long=long), length)
        for length, long in ((min(SHORT_WINDOW, context), False), (context, True))
    }
    short, step = min(streams), 0
    while True:
        step += 1
        length = context if step % recipe.long_every == 0 else short
        rows = [next(streams[length]) for _ in range(max(1, recipe.tokens_per_step // length))]
        yield torch.tensor([ids for ids, _ in rows]), torch.tensor([labels for _, labels in rows])


def loss_of(net: Net, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, in nats, of the tokens that the model is to learn."""
    ids, labels = batch
    logits = net(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def optimizer_of(net: Net) -> torch.optim.AdamW:
    """Return AdamW with two groups: latent ternary weights, with weight decay, and the rest."""
    ternary = net.ternary_weights()
    rest = [p for name, p in net.named_parameters() if name not in ternary]
    groups = [{"params": list(ternary.values())}, {"params": rest}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


class Training:
    """A training run; `run` trains until the recipe's time or steps are over. clock: in seconds."""

    def __init__(
        self, net: Net, recipe: Recipe, clock: Callable[[], float], report: Callable[[str], None]
    ) -> None:
        self.net = net
        self.recipe = recipe
        self.clock = clock
        self.report = report
        self.optimizer = optimizer_of(net)
        self.started = clock()
        self.steps = 0
        self.tokens = 0
        self.losses: list[float] = []

    def progress(self) -> float:
        """Return the share of the run that has passed; it can exceed 1."""
        if self.recipe.steps is not None:
            return self.steps / self.recipe.steps
        assert self.recipe.minutes is not None
        return (self.clock() - self.started) / (self.recipe.minutes * 60)

    def run(self, source: Iterator[Batch], save: Callable[[], None]) -> None:
        """Train to the end; `save` is called every SAVE_EVERY_S and once more at the end."""
        saved = self.started
        while (progress := self.progress()) < 1:
            self.step(next(source), progress)
            if self.steps % REPORT_EVERY_STEPS == 0:
                self.report(self.line())
            if self.clock() - saved > SAVE_EVERY_S:
                save()
                saved = self.clock()
        self.report(self.line())
        save()

    def step(self, batch: Batch, progress: float) -> None:
        """Update the weights once, with the learning rate and the decay that `progress` implies."""
        recipe = self.recipe
        ternary, rest = self.optimizer.param_groups
        ternary["lr"] = rest["lr"] = recipe.rate(self.steps, progress)
        ternary["weight_decay"] = recipe.weight_decay * (progress < recipe.falls_from)
        loss = loss_of(self.net, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), recipe.max_grad_norm)
        self.optimizer.step()
        self.steps += 1
        self.tokens += batch[0].numel()
        self.losses.append(loss.item())

    def line(self) -> str:
        """Return a progress line: step, tokens, mean of recent losses, speed, time left."""
        passed = self.clock() - self.started
        done = min(self.progress(), 1.0)
        recent = self.losses[-REPORT_EVERY_STEPS:]
        left = passed / done - passed if done else float("inf")
        return (
            f"step {self.steps}  tokens {self.tokens / 1e6:.2f} M  "
            f"loss {sum(recent) / len(recent):.4f}  rate {self.recipe.rate(self.steps, done):.1e}  "
            f"{self.tokens / passed:.0f} tokens/s  {passed:.0f} s passed  {left:.0f} s left"
        )


def train(
    directory: Path,
    shape: Shape,
    recipe: Recipe,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = print,
    *,
    compiled: bool = False,
) -> Training:
    """Write a tokenizer and a trained checkpoint to `directory`, and return the finished run."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(shape.vocab, recipe.seed, recipe.tokenizer_documents)
    save_tokenizer(tokenizer, directory, shape.context)
    net = Net(shape)
    if compiled:
        net.compile(dynamic=False)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    report(f"{parameters} parameters, {torch.get_num_threads()} threads")
    training = Training(net, recipe, clock, report)
    training.run(batches(tokenizer, recipe, shape.context), lambda: save_checkpoint(net, directory))
    return training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="directory for the checkpoint")
    parser.add_argument("--minutes", type=float, help="duration of the training (default 26)")
    parser.add_argument("--steps", type=int, help="number of steps, in place of a duration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=Recipe.peak_rate, help="peak learning rate")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    minutes = asked.minutes if asked.steps or asked.minutes else Recipe.minutes
    recipe = Recipe(minutes=minutes, steps=asked.steps, seed=asked.seed, peak_rate=asked.rate)
    train(
        asked.out,
        Shape(),
        recipe,
        report=lambda line: print(line, flush=True),
        compiled=asked.compile,
    )


if __name__ == "__main__":
    main()
