"""Embeddings and classes of a text, by sentence-transformers and transformers: `tailrace[embed]`.

The libraries compute the results, because they define how a checkpoint's tokenizer, pooling and
head are used. A stream has one text and one result, and each text is computed alone: in a batch the
padding would change the last bits of the result, but a stream that is produced again must get the
same result.

A text beyond the model's limit is refused, not cut. An embedding of the text's beginning cannot be
distinguished from one of the whole text, for example once it is stored in a search index.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.ledger.errors import CallerError, ConfigError, ModelError
from tailrace.origin.producer import About, End, Label, Output, Request, Resumption, Vector

MODULES_FILE = "modules.json"
CONFIG_FILE = "config.json"
WEIGHTS = "*.safetensors"
ONE_AT_A_TIME = 1
"""Maximum texts computed at once per process; torch uses all its cores for one."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Outputs for one text, and its number of tokens, including special ones."""

    outputs: tuple[Vector, ...] | tuple[Label, ...]
    tokens: int


Compute = Callable[[str], Computed]
"""Type of a blocking function that computes the outputs for a text.

Raises CallerError for a text that the model refuses.
"""


def is_embedding(folder: Path) -> bool:
    """Return True if the folder has a model of sentence-transformers."""
    return (folder / MODULES_FILE).is_file()


def is_classifier(folder: Path) -> bool:
    """Return True if the folder has a checkpoint with a head that classifies whole texts."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
        names = config.get("architectures") or []
        return any(name.endswith("ForSequenceClassification") for name in names)
    except (OSError, ValueError, AttributeError, TypeError):
        return False  # loading the folder will report what is wrong


class Embedder:
    """A producer of embeddings or classes, which `compute` computes with one model."""

    def __init__(self, compute: Compute, about: About) -> None:
        self.about = about
        self._compute = compute
        self._turns = asyncio.Semaphore(ONE_AT_A_TIME)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        if request.recipe.messages or not request.recipe.prompt:
            raise CallerError(
                "this model takes one text", field="prompt", hint="send the text as `prompt`"
            )
        async with self._turns:
            computed = await asyncio.to_thread(self._compute, request.recipe.prompt)
        for output in computed.outputs:
            yield output
        yield End(prompt_tokens=computed.tokens)

    async def close(self) -> None:
        """Do nothing, because the process ends after this call."""


async def open_embedder(folder: Path, device: str) -> Embedder:
    """Load a folder's model.

    Raises ConfigError if a library is not installed, and ModelError if the folder cannot be loaded.
    """
    load, library = (
        (_load_encoder, "sentence_transformers")
        if is_embedding(folder)
        else (_load_classifier, "transformers")
    )
    version = (await asyncio.to_thread(_library, library)).__version__
    compute, runs_on = await asyncio.to_thread(load, folder, device)
    fingerprint = await asyncio.to_thread(_fingerprint, folder, f"{library} {version} {runs_on}")
    about = About(folder.name, fingerprint, Resumption.REPEATS, runs_on)
    return Embedder(compute, about)


def _load_encoder(folder: Path, device: str) -> tuple[Compute, str]:
    library = _library("sentence_transformers")
    try:
        model = library.SentenceTransformer(str(folder), device=_device(device))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"cannot be loaded: {error}", field=str(folder)) from error

    def compute(text: str) -> Computed:
        tokens = _count(model.tokenizer, text, model.max_seq_length)
        values = model.encode(text, show_progress_bar=False).tolist()
        return Computed((Vector(tuple(values)),), tokens)

    return compute, str(model.device)


def _load_classifier(folder: Path, device: str) -> tuple[Compute, str]:
    library = _library("transformers")
    try:
        pipeline = library.pipeline("text-classification", str(folder), device=_device(device))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"cannot be loaded: {error}", field=str(folder)) from error
    limit = getattr(pipeline.model.config, "max_position_embeddings", None)

    def compute(text: str) -> Computed:
        tokens = _count(pipeline.tokenizer, text, limit)
        scored = pipeline(text, top_k=None)
        return Computed(tuple(Label(each["label"], each["score"]) for each in scored), tokens)

    return compute, str(pipeline.device)


def _count(tokenizer: Any, text: str, limit: int | None) -> int:
    """Return the number of tokens of a text. Raises CallerError if the model's limit is lower."""
    tokens = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
    if limit is not None and tokens > limit:
        raise CallerError(
            f"the text has {tokens} tokens, this model takes {limit}",
            field="prompt",
            hint="split the text and embed its parts",
        )
    return tokens


def _device(device: str) -> str | None:
    """Return the device for sentence-transformers or transformers; None lets the library choose."""
    return None if device == "auto" else device


def _library(name: str) -> Any:
    """Import sentence-transformers or transformers by its module name.

    Both are imported late, because they import torch, and as `Any`, because they have no types.
    """
    try:
        importlib.import_module("transformers").utils.logging.disable_progress_bar()
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{name}, which serves this model, is not installed",
            field="origin.model",
            hint="pip install 'tailrace[embed]'",
        ) from error


def _fingerprint(folder: Path, runs_on: str) -> str:
    """Return the SHA-256 of `runs_on` (library, version, device) and of the model's files."""
    digest = hashlib.sha256(runs_on.encode())
    for path in sorted((*folder.rglob("*.json"), *folder.rglob(WEIGHTS))):
        digest.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
