"""The vocabulary of a recogniser: the files of its model, and its words or sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from tailrace.origin.pipelines.speech import library
from tailrace.origin.pipelines.stage import StageOptions

MAX_WORDS = 1_000
"""Maximum number of words of the option `words`."""
MAX_GRAMMAR_BYTES = 64 << 10
"""Maximum size of a grammar, in bytes."""
_WORD = re.compile(r"[a-z][a-z'.-]*")
_ALTERNATIVE = re.compile(r"\(\d+\)$")
_GRAMMAR_WORD = re.compile(r"<[^>]*>|[\w'.-]+")


class VocabularyOptions(StageOptions):
    """The options that choose the model and the vocabulary of a recogniser."""

    words: tuple[str, ...] = Field(
        (),
        max_length=MAX_WORDS,
        description="The only words to recognise, in any order, such as digits or commands. They"
        " must be in the dictionary, in lower case.",
    )
    grammar: Path | None = Field(
        None, description="File with the sentences to recognise, as a grammar in JSGF."
    )
    language_model: Path | None = Field(
        None,
        description="File with an n-gram model of the language. Default: that of English, unless"
        " there are words or a grammar.",
    )
    dictionary: Path | None = Field(
        None, description="File with the pronunciation of words. Default: that of English."
    )
    model: Path | None = Field(
        None, description="Folder with the acoustic model. Default: that of English."
    )

    @field_validator("words")
    @classmethod
    def _check_words(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if not _WORD.fullmatch(word):
                raise ValueError(f"{word!r:.40} is not a word of lower-case letters")
        return words

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        library.check_installed()
        given = [name for name in ("words", "grammar", "language_model") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}")
        for name in ("grammar", "language_model", "dictionary"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name}: there is no file {path}")
        if self.model is not None and not self.model.is_dir():
            raise ValueError(f"model: there is no folder {self.model}")
        if self.grammar is not None and self.grammar.stat().st_size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar: {self.grammar} has more than {MAX_GRAMMAR_BYTES} bytes")
        if self.words:
            known = {word for word, _ in pronunciations(self.words, self.dictionary_file)}
            if unknown := sorted(set(self.words) - known):
                raise ValueError(f"words: the dictionary has no {', '.join(unknown)}")
        return self

    @property
    def dictionary_file(self) -> Path:
        """The file with the pronunciation of words."""
        return self.dictionary or library.model_folder() / "cmudict-en-us.dict"

    @property
    def model_files(self) -> Path:
        """The folder with the acoustic model."""
        return self.model or library.model_folder() / "en-us"

    @property
    def has_grammar(self) -> bool:
        """True if there are words or a grammar, and so no language model."""
        return bool(self.words or self.grammar)

    def jsgf(self) -> str | None:
        """Return the grammar of the words or of the grammar file; None for a language model."""
        if self.grammar is not None:
            return self.grammar.read_text("utf-8")
        if self.words:
            return f"#JSGF V1.0; grammar words; public <words> = ({' | '.join(self.words)})+;"
        return None


def words_of(jsgf: str) -> set[str]:
    """Return the words that a grammar may have, and others that do no harm in a dictionary."""
    return {each for each in _GRAMMAR_WORD.findall(jsgf) if not each.startswith("<")}


def pronunciations(words: Iterable[str], dictionary: Path) -> list[tuple[str, str]]:
    """Return each of the words that a dictionary has, with each of its lines there."""
    wanted = set(words)
    found = []
    with dictionary.open(encoding="utf-8") as lines:
        for line in lines:
            word = _ALTERNATIVE.sub("", line.split(None, 1)[0]) if line.strip() else ""
            if word in wanted:
                found.append((word, line))
    return found
