"""tokenizer.json: loaded as transformers reads it, and whether it fits the model and the files
beside it, which is read as JSON.

tokenizer.json alone makes the ids. Where another file says something else, transformers follows
that one, in ways that differ by class and version, so such a contradiction is refused by name.
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

SAVED_AGAIN = f"what {TOKENIZER_FILE} holds; transformers' save_pretrained writes them anew"
# What decides the ids in an added token, and its value where it is not said; `normalized` is the
# opposite of `special` there.
TOKEN_FLAGS = {"special": False, "lstrip": False, "rstrip": False, "single_word": False}
# Only a template writes these two, and models are trained with them.
WRITTEN_TOKENS = ("bos_token", "eos_token")
Token = dict[str, Any]


def load_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json of a checkpoint; ModelError if it cannot be read.

    A file that was saved while a model was trained may cut and fill up what it encodes; neither
    is a part of the model, and transformers does neither unless it is asked to.
    """
    path = directory / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises nothing narrower
        raise ModelError(f"cannot be read: {exc}", field=str(path)) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_tokenizer(directory: Path, vocab: int, eos_ids: Set[int], findings: Findings) -> None:
    """Every id of the tokenizer is a row of the embedding, every end of text is a token, and no
    other file says that the tokenizer is another one.
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
    """Id -> token; what is not of the format is left out."""
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
    """(id, token) of the added tokens; what is not of the format is left out."""
    added = raw.get("added_tokens")
    for item in added if isinstance(added, list) else []:
        if isinstance(item, dict) and type(item.get("id")) is int:
            yield item["id"], _token(item)


def _token(said: Mapping[str, Any]) -> Token:
    """Its content, and what decides where it is found."""
    flags = {name: said.get(name, default) for name, default in TOKEN_FLAGS.items()}
    normalized = said.get("normalized", not flags["special"])
    return {"content": str(said.get("content")), **flags, "normalized": normalized}


def _check_special(config: JsonObject, texts: Set[str], added: Set[str]) -> None:
    """A template that writes a token that is none would write its letters, and transformers
    makes a token of each that is named.
    """
    for key, value in _named(config.raw):
        text = value.get("content") if isinstance(value, dict) else value
        is_text = isinstance(text, str)
        if is_text and text in added:
            continue
        if key in WRITTEN_TOKENS or not is_text or text in texts:
            config.fault(key, shown(value), f"one of the added_tokens of {TOKENIZER_FILE}")
        else:
            config.note(key, f"{shown(value)} is no token of {TOKENIZER_FILE}", "it stays letters")


def _named(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, token as it is written) of every special token that tokenizer_config.json names."""
    for key, value in raw.items():
        if key.endswith("special_tokens") and isinstance(value, list):
            yield from ((key, item) for item in value)
        elif key.endswith("_token") and value is not None and not isinstance(value, bool):
            yield key, value


def _check_added(directory: Path, config: JsonObject, added: Mapping[int, Token]) -> None:
    """The added tokens of other files are those of tokenizer.json."""
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
    """What is put before and behind a prompt."""
    flags = ("add_bos_token", "add_eos_token")
    if not any(flag in config.raw for flag in flags):
        return
    for flag, does in zip(flags, _ends(raw), strict=True):
        text = config.raw.get(flag.removeprefix("add_"))
        text = text.get("content") if isinstance(text, dict) else text
        if does != (text if config.flag(flag) else None):
            right = f"what the post_processor of {TOKENIZER_FILE} adds: {shown(does)}"
            config.fault(flag, shown(config.raw.get(flag)), right)


def _ends(raw: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens that a TemplateProcessing puts before and behind a text."""
    templates = (part.get("single") for part in _parts(raw.get("post_processor")))
    single = next((template for template in templates if isinstance(template, list)), [])
    named = [piece.get("SpecialToken") for piece in single if isinstance(piece, dict)]
    ends = [end.get("id") if isinstance(end, dict) else None for end in named or [None]]
    return ends[0], ends[-1]


def _check_space(config: JsonObject, raw: Mapping[str, Any]) -> None:
    """What is put before the first word."""
    does = any(
        part.get("type") == "Prepend"
        or part.get("add_prefix_space") is True
        or part.get("prepend_scheme") in ("always", "first")
        for key in ("normalizer", "pre_tokenizer")
        for part in _parts(raw.get(key))
    )
    if config.flag("add_prefix_space", default=does) != does:
        config.fault("add_prefix_space", shown(not does), f"what {TOKENIZER_FILE} does")


def _parts(part: object) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer and the like, each of which may be a sequence of others."""
    if isinstance(part, list):
        for item in part:
            yield from _parts(item)
    elif isinstance(part, dict):
        yield part
        for key in ("normalizers", "pretokenizers", "processors"):
            yield from _parts(part.get(key))
