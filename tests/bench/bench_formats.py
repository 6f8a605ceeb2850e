"""Measure quality, memory and speed of each number format on a CPU.

    python tests/bench/bench_formats.py [--model DIR] [--minutes 3] [--texts 24]

Without --model it trains a small Llama on the demo model's corpus first. Perplexity is that of the
corpus' documents of another seed, read with the model's own tokenizer; error is that of the logits
beside those of `auto`, as a share of their spread. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from demo.corpus import documents  # noqa: E402
from demo.tokens import windows  # noqa: E402
from demo.train import Recipe, batches  # noqa: E402
from tailrace.origin.checkpoint.model_check import check_model  # noqa: E402
from tailrace.origin.formats import AS_STORED, Formats  # noqa: E402
from tailrace.origin.models.cpu_model import CpuModel, load  # noqa: E402
from tailrace.origin.models.model import context_pages, prefill  # noqa: E402
from tests.bench.bench_decode import DEMO_MODEL, step_of  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402

CASES = (
    AS_STORED,
    Formats(weights="int8"),
    Formats(weights="int4"),
    Formats(kv_cache="int8"),
    Formats(kv_cache="fp8"),
    Formats(head="int8"),
    Formats("int8", "int8", "int8"),
    Formats("int4", "int8", "int8"),
)
TRAINED_SEED, HELD_OUT_SEED = 1, 9
TEXT_TOKENS = 512
CONTEXT = 1024
BATCHES = (1, 16)
SPEED_CONTEXT = 300


class Quality(NamedTuple):
    """Logits and perplexity of a model on the test documents."""

    logits: Tensor
    nats: float
    """Mean negative log-likelihood of a token."""


def train(directory: Path, minutes: float) -> None:
    """Train a Llama of a million weights, in bf16, on the demo model's corpus."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    torch.manual_seed(TRAINED_SEED)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=384,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, attention_dropout=0.0,
        bos_token_id=None, eos_token_id=0, rms_norm_eps=1e-5,
    )  # fmt: skip
    net = LlamaForCausalLM(config)
    recipe = Recipe(minutes=minutes, seed=TRAINED_SEED, tokens_per_step=1024)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    began, loss = time.monotonic(), torch.tensor(torch.nan)
    for step, (ids, labels) in enumerate(batches(tokenizer, recipe, CONTEXT)):
        progress = (time.monotonic() - began) / (minutes * 60)
        if progress >= 1:
            print(f"trained {step} steps, loss {loss.item():.3f}")
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step, progress)
        loss = net(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), recipe.max_grad_norm)
        optimizer.step()
    net.bfloat16().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory)


def held_out(directory: Path, texts: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    corpus = windows(tokenizer, documents(HELD_OUT_SEED, long=True), TEXT_TOKENS)
    return [ids for ids, _ in islice(corpus, texts)]


@torch.inference_mode()
def quality_of(model: CpuModel, texts: list[list[int]]) -> Quality:
    pages = range(context_pages(model.config))
    rows = [model.logits(prefill(model, ids, pages)) for ids in texts]
    logits = torch.stack([row[:-1] for row in rows]).flatten(0, 1)
    wanted = torch.tensor([ids[1:] for ids in texts]).flatten()
    return Quality(logits, float(torch.nn.functional.cross_entropy(logits, wanted)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--texts", type=int, default=24)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = asked.model or Path(folder)
        if asked.model is None:
            train(directory, asked.minutes)
        measure(directory, asked.texts)


def measure(directory: Path, count: int) -> None:
    texts, found = held_out(directory, count), []
    plain: Quality | None = None
    for formats in CASES:
        report = check_model(directory, formats)
        if not report.supported:
            continue
        model, footprint = load(directory, formats=formats), report.footprints["cpu"]
        quality = quality_of(model, texts)
        plain = plain or quality
        difference = quality.logits - plain.logits
        row: dict[str, object] = {
            "formats": str(formats) or "auto",
            "weights_mib": round(footprint.weights_bytes / 2**20, 2),
            "kv_token_bytes": footprint.kv_token_bytes,
            "perplexity": round(float(torch.tensor(quality.nats).exp()), 4),
            "logit_error": round(float(difference.std() / plain.logits.std()), 4),
            "same_best": round(
                float((quality.logits.argmax(1) == plain.logits.argmax(1)).float().mean()), 4
            ),
        }
        for batch in BATCHES:
            row[f"tok_s_{batch}"] = step_of(model, batch, SPEED_CONTEXT)["tok_s"]
        found.append(row)
        print(row)
    print_line({"model": directory.name, "rows": found})


if __name__ == "__main__":
    main()
