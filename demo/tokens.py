"""The demo model's tokenizer: byte-level BPE trained on the corpus, and its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.corpus import CHAT_TEMPLATE, END, SPECIAL_TOKENS, Document, documents, text

IGNORED = -100

# Splits text before byte pairs are merged. Digits are separate tokens, so that the model computes
# digit by digit. A word, a digit or a punctuation mark includes the space before it.
_PIECES = r" ?\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"


def train_tokenizer(vocab_size: int, seed: int, documents_read: int) -> Tokenizer:
    """Train byte-level BPE with `vocab_size` entries, of which END has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_ordinary_text(seed, documents_read), trainer)
    return tokenizer


def _ordinary_text(seed: int, documents_read: int) -> Iterator[str]:
    """Yield text of the corpus without special tokens, which need no merges."""
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for document in islice(documents(seed), documents_read):
        yield from special.split(text(document))


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Return a document's token ids, and its labels: the ids, or IGNORED for text not to learn."""
    ids: list[int] = []
    labels: list[int] = []
    for part in document:
        piece = tokenizer.encode(part.text).ids
        ids += piece
        labels += piece if part.learned else [IGNORED] * len(piece)
    return ids, labels


def windows(
    tokenizer: Tokenizer, corpus: Iterable[Document], length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield windows of `length` ids and labels: documents one after another, the last one cut.

    A window begins at the beginning of a document, so that position 0 is the beginning of a text,
    as it is in a served prompt.
    """
    ids: list[int] = []
    labels: list[int] = []
    for document in corpus:
        more_ids, more_labels = encode(tokenizer, document)
        ids += more_ids
        labels += more_labels
        if len(ids) >= length:
            yield ids[:length], labels[:length]
            ids, labels = [], []


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template)."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
