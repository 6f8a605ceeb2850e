"""Whether tokenizer.json fits the model: read as JSON, so that neither torch nor tokenizers is
needed.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from origin.checkpoint.finding import Findings
from origin.checkpoint.model_json import read_object, read_object_if_there, shown

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def check_tokenizer(directory: Path, vocab: int, eos_ids: Set[int], findings: Findings) -> None:
    """Every id of the tokenizer is a row of the embedding, and every end of text is a token."""
    path = directory / TOKENIZER_FILE
    raw = read_object(path, findings)
    if raw is None:
        return
    tokens = _tokens(raw)
    if not tokens:
        findings.fault(path, "model.vocab", "holds no tokens")
        return
    highest = max(tokens)
    if highest >= vocab:
        right = f"ids below vocab_size {vocab}"
        findings.fault(path, "model.vocab", f"{shown(tokens[highest])} has id {highest}", right)
    for missing in sorted(eos_ids - tokens.keys()):
        findings.fault(path, "added_tokens", f"no token has the eos_token_id {missing}")
    _check_eos_text(directory, set(tokens.values()), findings)


def _tokens(raw: dict[str, Any]) -> dict[int, str]:
    """Id -> token; what is not of the format is left out."""
    model, added = raw.get("model"), raw.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[int, str] = {}
    if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel
        tokens = {at: text for text, at in vocab.items() if type(at) is int}
    elif isinstance(vocab, list):  # Unigram: [token, score] in the order of the ids
        tokens = {
            at: str(item[0]) for at, item in enumerate(vocab) if isinstance(item, list) and item
        }
    for item in added if isinstance(added, list) else []:
        if isinstance(item, dict) and type(item.get("id")) is int:
            tokens[item["id"]] = str(item.get("content"))
    return tokens


def _check_eos_text(directory: Path, texts: Set[str], findings: Findings) -> None:
    """A chat template that writes an eos_token that is no token would write its letters."""
    path = directory / TOKENIZER_CONFIG_FILE
    value = read_object_if_there(path, findings).get("eos_token")
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not (isinstance(text, str) and text in texts):
        findings.fault(path, "eos_token", shown(text), f"a token of {TOKENIZER_FILE}")
