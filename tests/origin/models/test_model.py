"""Models: chunks of a prompt, pages, and the files that a fingerprint covers."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace import kernels
from tailrace.kernels.rows import norm
from tailrace.ledger.errors import ModelError
from tailrace.origin.models import cpu_model
from tailrace.origin.models.cpu_model import CpuModel, load
from tailrace.origin.models.model import (
    MAX_KNOWN_TABLES,
    PREFILL_CHUNK_TOKENS,
    SHARED_CODE,
    KnownPages,
    Piece,
    context_pages,
    prefill,
    prefill_chunks,
)
from tailrace.origin.models.tensors import checkpoint_files
from tests.origin.models.sequences import prompt_logits
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers compiles parts of BitNet otherwise


def random_ids(count: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 300, (count,), generator=random).tolist()


def load_reference(directory: Path) -> torch.nn.Module:
    """Return the same checkpoint in transformers, in fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # Its own .float() refuses quantised models, whose scales stay bf16 otherwise.
    return torch.nn.Module.float(loaded)


def greedy(model: CpuModel, prompt: list[int], count: int) -> list[int]:
    pages = range(context_pages(model.config))
    hidden = prefill(model, prompt, pages)[-1:]
    ids: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        ids.append(int(model.logits(hidden).argmax()))
        hidden = model.forward([Piece(ids[-1:], position, pages, prefill=False)])
    return ids


@pytest.mark.parametrize("tied_head", [True, False])
def test_it_equals_transformers(tmp_path: Path, tied_head: bool) -> None:
    write_checkpoint(tmp_path, Shape(tied_head=tied_head))
    model, reference = load(tmp_path), load_reference(tmp_path)
    differences = []
    for seed in range(8):
        ids = random_ids(10, seed)
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0]
        logits = prompt_logits(model, ids)
        differences.append(float((logits - expected).abs().max()))
        assert logits.argmax(-1).equal(expected.argmax(-1))
    # Where an activation lies on the edge between two int8 values, the last bit of a sum,
    # which differs between CPUs, picks the side: one prompt in eight may do so.
    assert sorted(differences)[-2] < 1e-5


def test_it_generates_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape(tied_head=False))
    prompt = random_ids(7, 3)
    generated = load_reference(tmp_path).generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert greedy(load(tmp_path), prompt, 30) == generated[0, len(prompt) :].tolist()


def test_a_prompt_in_chunks_agrees_with_transformers(checkpoint: Path) -> None:
    ids = random_ids(PREFILL_CHUNK_TOKENS + 9, 6)
    with torch.no_grad():
        expected = load_reference(checkpoint)(torch.tensor([ids])).logits[0]
    logits = prompt_logits(load(checkpoint), ids)
    torch.testing.assert_close(logits[:8], expected[:8], rtol=1e-4, atol=1e-4)
    # Activations on an edge of rounding go their own way, a little further with every layer.
    assert float(torch.cosine_similarity(logits[-1], expected[-1], dim=0)) > 0.99


def test_a_prompt_is_cut_at_absolute_multiples() -> None:
    assert [len(chunk) for chunk in prefill_chunks(range(150))] == [64, 64, 22]
    assert [chunk[0] for chunk in prefill_chunks(range(128))] == [0, 64]


def test_loading_tells_its_progress(checkpoint: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load(checkpoint, lambda *stage: told.append(stage))
    size = sum(path.stat().st_size for path in checkpoint_files(checkpoint))
    assert told == [
        ("check", 0, 1),
        *(("read", 0, size), ("hash", 0, size)),
        *(("unpack", done, 2) for done in range(3)),
    ]


def test_packed_bits_that_stand_for_no_weight_are_refused_by_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj"):
        load(tmp_path)


def test_the_fingerprint_names_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    same = write_checkpoint(tmp_path / "same")
    other = write_checkpoint(tmp_path / "other", seed=2)
    fingerprint = load(checkpoint).fingerprint
    assert load(same).fingerprint == fingerprint
    assert load(other).fingerprint != fingerprint


def test_the_fingerprint_names_the_kernels(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(checkpoint).fingerprint
    changed = tmp_path / "norm.py"
    changed.write_text(Path(norm.__file__).read_text() + "\n")
    files = [changed if path.name == changed.name else path for path in kernels.sources()]
    monkeypatch.setattr(kernels, "sources", lambda: files)
    assert load(checkpoint).fingerprint != before


def test_fingerprints_cover_every_kernel_and_nothing_of_the_gate() -> None:
    """A file that moves to another folder must not drop out in silence."""
    root = Path(kernels.__file__).parent
    files = {path.relative_to(root).as_posix() for path in root.rglob("*.py")}
    gate = {name for name in files if name.startswith("gate/")}
    of_a_gpu = {path.relative_to(root).as_posix() for path in kernels.sources()}
    assert gate and of_a_gpu == files - gate
    on_a_cpu = {path.name for path in cpu_model._numeric_code()}
    launched = {Path(name).name for name in of_a_gpu if name.endswith("_triton.py")}
    assert {"norm.py", "ternary.py", "attention.py", "rope.py", "sampler.py"} <= on_a_cpu
    assert launched and not launched & on_a_cpu


def test_fingerprints_cover_the_files_of_both_devices() -> None:
    """Those that decide no bit of a result are named: another one is covered, or added here."""
    folder = Path(cpu_model.__file__).parent
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    shared = {f"models/{name}" for name in files} & set(SHARED_CODE)
    covered = {name.removeprefix("models/") for name in shared}
    covered |= {path.name for path in cpu_model._numeric_code() if path.parent == folder}
    covered |= {name for name in files if name.startswith("gpu_")}  # those in a folder do not
    idle = {"__init__.py", "load.py", "model.py"}
    assert files - covered == idle
    assert {"cpu_linear.py", "cpu_model.py", "gpu_layers.py", "tensors.py"} <= covered


class Looked(list[int]):
    """A block table that counts the pages that are looked at."""

    looked = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.looked += len(found)
        return found


def test_a_page_is_checked_once_however_often_its_table_comes() -> None:
    known, table = KnownPages(100), Looked(range(64))
    for _ in range(5):
        known.check(table, 60)
    assert table.looked == 60
    table.append(99)
    known.check(table, 65)
    assert table.looked == 65


@pytest.mark.parametrize("page", [-1, 100])
def test_a_page_that_is_not_in_the_cache_is_refused_wherever_it_comes(page: int) -> None:
    known, table = KnownPages(100), [5, 6]
    known.check(table, 2)
    table += [7, page]
    known.check(table, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="outside the 100 of the cache"):
            known.check(table, 4)
    with pytest.raises(ValueError, match="outside the 100 of the cache"):
        known.check([page], 1)


def test_as_many_tables_are_remembered_as_are_allowed() -> None:
    known = KnownPages(100)
    for _ in range(MAX_KNOWN_TABLES + 3):
        known.check([1], 1)
    assert len(known._known) == 3
