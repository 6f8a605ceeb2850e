"""Loads tokenizer.json, and checks that it fits the model and the other tokenizer files.

Only tokenizer.json determines the ids. If another file contradicts tokenizer.json, transformers
follows one or the other, depending on class and version. So a contradiction is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.finding import (
    Findings,
    JsonObject,
    read_object,
    read_object_if_there,
    shown,
)

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"

SAVED_AGAIN = f"the same as in {TOKENIZER_FILE}; transformers' save_pretrained rewrites both"
# Flags of an added token that affect the ids, with their defaults. The default of `normalized` is
# the opposite of `special`.
TOKEN_FLAGS = {"special": False, "lstrip": False, "rstrip": False, "single_word": False}
# Chat templates write these tokens, and models are trained with them, so tokenizer.json must have
# them.
WRITTEN_TOKENS = ("bos_token", "eos_token")
Token = dict[str, Any]


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load tokenizer.json of a checkpoint, without truncation and padding.

    A file that was saved during training may set both. By default transformers ignores them, too.

    Raises:
        ModelError: The file cannot be read.
    """
    path = directory / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the only class that the library `tokenizers` raises
        raise ModelError(f"cannot be read: {exc}", field=str(path)) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_tokenizer(directory: Path, vocab: int, eos_ids: Set[int], findings: Findings) -> None:
    """Add a fault for each disagreement of tokenizer.json with the model or another file.

    Every id must be a row of the embedding, and every end-of-text id a token.
    """
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
    path = directory / TOKENIZER_CONFIG_FILE
    config = JsonObject(path, read_object_if_there(path, findings), findings)
    _check_special(config, set(tokens.values()), {token["content"] for _, token in _added(raw)})
    _check_added(directory, config, dict(_added(raw)))
    _check_ends(config, raw)
    _check_space(config, raw)
    config.only("split_special_tokens", False, default=False)


def _tokens(raw: Mapping[str, Any]) -> dict[int, str]:
    """Return the token of each id, without entries that are malformed."""
    model = raw.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[int, str] = {}
    if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel
        tokens = {at: text for text, at in vocab.items() if type(at) is int}
    elif isinstance(vocab, list):  # Unigram: [token, score] in the order of the ids
        tokens = {
            at: str(item[0]) for at, item in enumerate(vocab) if isinstance(item, list) and item
        }
    return tokens | {at: token["content"] for at, token in _added(raw)}


def _added(raw: Mapping[str, Any]) -> Iterator[tuple[int, Token]]:
    """Yield (id, token) for the added tokens, without entries that are malformed."""
    added = raw.get("added_tokens")
    for item in added if isinstance(added, list) else []:
        if isinstance(item, dict) and type(item.get("id")) is int:
            yield item["id"], _token(item)


def _token(said: Mapping[str, Any]) -> Token:
    """Return a token's content, and the flags that decide where it matches."""
    flags = {name: said.get(name, default) for name, default in TOKEN_FLAGS.items()}
    normalized = said.get("normalized", not flags["special"])
    return {"content": str(said.get("content")), **flags, "normalized": normalized}


def _check_special(config: JsonObject, texts: Set[str], added: Set[str]) -> None:
    """Add a fault or note for each special token that tokenizer.json does not have.

    A template that writes such a token would give plain letters here, whereas transformers adds the
    token to the vocabulary.
    """
    for key, value in _named(config.raw):
        text = value.get("content") if isinstance(value, dict) else value
        is_text = isinstance(text, str)
        if is_text and text in added:
            continue
        if key in WRITTEN_TOKENS or not is_text or text in texts:
            config.fault(key, shown(value), f"one of the added_tokens of {TOKENIZER_FILE}")
        else:
            config.note(
                key, f"{shown(value)} is not a token of {TOKENIZER_FILE}", "it is plain text"
            )


def _named(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, token) for every special token that tokenizer_config.json names."""
    for key, value in raw.items():
        if key.endswith("special_tokens") and isinstance(value, list):
            yield from ((key, item) for item in value)
        elif key.endswith("_token") and value is not None and not isinstance(value, bool):
            yield key, value


def _check_added(directory: Path, config: JsonObject, added: Mapping[int, Token]) -> None:
    """Add a fault for each added token of another file that differs from tokenizer.json."""
    decoder = config.child("added_tokens_decoder")
    if decoder is not None:
        for at, said in decoder.raw.items():
            found = added.get(int(at)) if at.isdecimal() else None
            if not isinstance(said, dict) or found != _token(said):
                decoder.fault(at, shown(said), SAVED_AGAIN)
        return
    path = directory / ADDED_TOKENS_FILE
    for text, at in read_object_if_there(path, config.findings).items():
        if type(at) is not int or added.get(at, {}).get("content") != text:
            config.findings.fault(path, text, shown(at), SAVED_AGAIN)


def _check_ends(config: JsonObject, raw: Mapping[str, Any]) -> None:
    """Add a fault if add_bos_token or add_eos_token contradicts tokenizer.json."""
    flags = ("add_bos_token", "add_eos_token")
    if not any(flag in config.raw for flag in flags):
        return
    for flag, does in zip(flags, _ends(raw), strict=True):
        text = config.raw.get(flag.removeprefix("add_"))
        text = text.get("content") if isinstance(text, dict) else text
        if does != (text if config.flag(flag) else None):
            right = f"as the post_processor of {TOKENIZER_FILE}, which adds {shown(does)}"
            config.fault(flag, shown(config.raw.get(flag)), right)


def _ends(raw: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the special tokens that a TemplateProcessing puts before and after a text."""
    templates = (part.get("single") for part in _parts(raw.get("post_processor")))
    single = next((template for template in templates if isinstance(template, list)), [])
    named = [piece.get("SpecialToken") for piece in single if isinstance(piece, dict)]
    ends = [end.get("id") if isinstance(end, dict) else None for end in named or [None]]
    return ends[0], ends[-1]


def _check_space(config: JsonObject, raw: Mapping[str, Any]) -> None:
    """Add a fault if add_prefix_space contradicts tokenizer.json."""
    does = any(
        part.get("type") == "Prepend"
        or part.get("add_prefix_space") is True
        or part.get("prepend_scheme") in ("always", "first")
        for key in ("normalizer", "pre_tokenizer")
        for part in _parts(raw.get(key))
    )
    if config.flag("add_prefix_space", default=does) != does:
        config.fault("add_prefix_space", shown(not does), f"{shown(does)}, as in {TOKENIZER_FILE}")


def _parts(part: object) -> Iterator[dict[str, Any]]:
    """Yield a part of tokenizer.json, such as a normalizer, and all parts that it contains."""
    if isinstance(part, list):
        for item in part:
            yield from _parts(item)
    elif isinstance(part, dict):
        yield part
        for key in ("normalizers", "pretokenizers", "processors"):
            yield from _parts(part.get(key))
