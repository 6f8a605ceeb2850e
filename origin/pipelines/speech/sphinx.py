"""A recogniser by PocketSphinx.

A decoder serves one utterance at a time, and then any other one with the same options. So a process
has as many decoders as streams in which somebody speaks at the moment. The decoder adapts to a
voice. What it has learnt belongs to the stream, which gives it to each decoder that it uses.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailrace.ledger.errors import ConfigError, Overloaded
from tailrace.origin.pipelines.speech import library
from tailrace.origin.pipelines.speech.items import Word
from tailrace.origin.pipelines.speech.pcm import BYTES_PER_MS
from tailrace.origin.pipelines.speech.vocabulary import (
    VocabularyOptions,
    pronunciations,
    words_of,
)

MAX_DECODERS = 128
"""Maximum number of streams of a process in which somebody speaks at the same time, if the
recogniser has words or a grammar. A decoder takes about 6 MB."""
MAX_LARGE_DECODERS = 16
"""The same for a language model, whose decoder takes about 90 MB."""
FIRST_ESTIMATE_MS = 800
"""Length of the sound from which the mean of a new voice is first computed, in ms."""
NEW_VOICE_MS = 3_000
"""Total length of a stream's utterances after which its voice is not new any more, in ms."""
FRAME_MS = 10
"""Length of the frames of the decoder, in ms."""
WORD_PENALTY = 0.002
"""Factor for the probability of one more word of a grammar. The library's own, 0.65, hears more
words than there are: see tests/bench/SPEECH.md."""
_ALTERNATIVE = re.compile(r"\(\d+\)$")
_GRAMMAR_NAME = "grammar"


class SphinxRecogniser:
    """Recognises the utterances of one stream.

    The decoder subtracts the mean of the voice's spectrum, and learns it slowly. So as long as a
    voice is new, the sound of an utterance is kept. Its mean is computed after
    `FIRST_ESTIMATE_MS`, and again at the end, and the sound is then decoded with it.
    """

    def __init__(self, options: VocabularyOptions) -> None:
        """Begin without a decoder."""
        self._options = options
        self._decoder: Any = None
        self._means: str | None = None  # the mean of the voice
        self._known_ms = 0  # length of the utterances before
        self._kept = b""  # the utterance, as long as the voice is new
        self._latest: tuple[Word, ...] = ()

    @property
    def _is_new(self) -> bool:
        return self._known_ms < NEW_VOICE_MS

    def begin(self) -> None:
        """Take a free decoder, or make one."""
        self._decoder = DECODERS.take(self._options)
        self._start()

    def feed(self, pcm: bytes) -> tuple[Word, ...]:
        """Decode samples, and return the words so far."""
        if self._is_new:
            before, self._kept = self._kept, self._kept + pcm
            enough = FIRST_ESTIMATE_MS * BYTES_PER_MS
            if self._means is None and len(before) < enough <= len(self._kept):
                pcm = self._kept
                self._decode_again()
                self._start()
        if pcm:
            self._decoder.process_raw(pcm)
        self._latest = self._words() or self._latest
        return self._latest

    def end(self) -> tuple[Word, ...]:
        """Return the words of the utterance, and hand back the decoder."""
        if self._is_new and self._kept:
            self._decode_again()
        else:
            self._decoder.end_utt()
            self._means = self._decoder.get_cmn(False)
        # No words mean that the end does not fit the grammar; the last ones before it did.
        words = self._words() or self._latest
        self._known_ms += len(self._kept) // BYTES_PER_MS
        self._kept = b""
        self._hand_back()
        return words

    def _start(self) -> None:
        # The decoder still has something of the utterance before, which may be another stream's.
        self._decoder.reinit_feat()
        self._decoder.set_cmn(self._means or DECODERS.initial_means(self._options))
        self._latest = ()
        self._decoder.start_utt()

    def _decode_again(self) -> None:
        """Decode the utterance so far with its own mean, which becomes that of the voice."""
        self._decoder.end_utt()
        self._decoder.reinit_feat()
        self._decoder.start_utt()
        self._decoder.process_raw(self._kept, full_utt=True)
        self._decoder.end_utt()
        self._means = self._decoder.get_cmn(False)

    def close(self) -> None:
        """Hand back the decoder of an utterance that does not end."""
        if self._decoder is not None:
            self._decoder.end_utt()
            self._hand_back()

    def _hand_back(self) -> None:
        decoder, self._decoder = self._decoder, None
        DECODERS.hand_back(self._options, decoder)

    def _words(self) -> tuple[Word, ...]:
        # Without a result the library returns None.
        return tuple(
            Word(
                _ALTERNATIVE.sub("", one.word),
                one.start_frame * FRAME_MS,
                (one.end_frame + 1) * FRAME_MS,
            )
            for one in self._decoder.seg() or ()
            if one.word[0] not in "<[+("
        )


class Decoders:
    """The decoders of a process."""

    def __init__(self) -> None:
        """Begin without decoders."""
        self._free: defaultdict[VocabularyOptions, list[Any]] = defaultdict(list)
        self._means: dict[VocabularyOptions, str] = {}
        self._busy: Counter[VocabularyOptions] = Counter()

    def take(self, options: VocabularyOptions) -> Any:
        """Return a decoder that is free, or a new one.

        Raises:
            Overloaded: Too many decoders are busy.
            ConfigError: The files of the options cannot be used.
        """
        most = MAX_DECODERS if options.has_grammar else MAX_LARGE_DECODERS
        if self._busy[options] >= most:
            hint = "give the stage more `processes`"
            raise Overloaded(f"more than {most} streams of a process have speech", hint=hint)
        free = self._free[options]
        decoder = free.pop() if free else _new_decoder(options)
        self._means.setdefault(options, decoder.get_cmn(False))
        self._busy[options] += 1
        return decoder

    def initial_means(self, options: VocabularyOptions) -> str:
        """Return the state of a decoder that has heard nothing."""
        return self._means[options]

    def hand_back(self, options: VocabularyOptions, decoder: Any) -> None:
        """Take back a decoder between two utterances."""
        self._busy[options] -= 1
        self._free[options].append(decoder)


DECODERS = Decoders()
"""The decoders of this process."""


def _new_decoder(options: VocabularyOptions) -> Any:
    settings: dict[str, Any] = {
        "hmm": str(options.model_files),
        "dict": str(options.dictionary_file),
        "loglevel": "FATAL",
        "logfn": os.devnull,
    }
    sphinx = library.load()
    jsgf = options.jsgf()
    try:
        if jsgf is None:
            model = options.language_model or library.model_folder() / "en-us.lm.bin"
            return sphinx.Decoder(sphinx.Config(**settings, lm=str(model)))
        # A small dictionary: with that of English a decoder takes 27 MB instead of 6.
        lines = pronunciations(words_of(jsgf), options.dictionary_file)
        settings["dict"] = _temporary_file("".join(line for _, line in lines))
        try:
            # A second search through the lattice finds nothing else, and takes 15 ms.
            config = sphinx.Config(**settings, lm=None, wip=WORD_PENALTY, bestpath=False)
            decoder = sphinx.Decoder(config)
        finally:
            with suppress(OSError):
                Path(settings["dict"]).unlink()
        decoder.add_jsgf_string(_GRAMMAR_NAME, jsgf)
        decoder.activate_search(_GRAMMAR_NAME)
    except (RuntimeError, ValueError, OSError) as error:
        used = options.grammar or options.language_model or options.model_files
        message = f"the recogniser cannot use its files ({used}): {error}"
        raise ConfigError(
            message, hint="check grammar, dictionary, language_model and model"
        ) from error
    return decoder


def _temporary_file(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".dict", delete=False, encoding="utf-8") as file:
        file.write(text)
    return file.name
