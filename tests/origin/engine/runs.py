"""Runs and emissions as a supervisor would see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, normalizers

from tailrace.ledger.frame import SAMPLING, Sampling, ScoredToken, StreamEnd, Token, decode
from tailrace.ledger.record_extra import IdSpan
from tailrace.origin.workers.worker_frame import Emission, StartRun
from tests.origin.tiny_checkpoint import END

if TYPE_CHECKING:
    from tailrace.origin.engine.engine import Engine
    from tailrace.origin.models.model import Model
    from tailrace.origin.scheduler.limits import Limits

PLAIN: dict[str, Any] = {
    "prompt_ids": (1, 2, 3),
    "generated_ids": (),
    "sent_bytes": 0,
    "next_index": 0,
    "max_tokens": 60,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "stop": (),
    "ignore_eos": False,
}


def make_run(**fields: Any) -> StartRun:
    """Return a run; its sampling is said flat."""
    given = PLAIN | fields
    sampling = Sampling(**{name: given.pop(name) for name in SAMPLING if name in given})
    return StartRun(sampling=sampling, **given)


def frame_of(emission: Emission) -> Token | ScoredToken | StreamEnd:
    corr, frame = decode(emission.frame)
    assert corr == 0
    assert isinstance(frame, Token | ScoredToken | StreamEnd)
    assert frame.index == emission.index
    return frame


def frames_of(emissions: Sequence[Emission]) -> list[Token | ScoredToken | StreamEnd]:
    return [frame_of(emission) for emission in emissions]


def text_of(emissions: Sequence[Emission]) -> str:
    frames = frames_of(emissions)
    return "".join(frame.text for frame in frames if not isinstance(frame, StreamEnd))


def end_of(emissions: Sequence[Emission]) -> StreamEnd:
    """Return the StreamEnd of a run, which is its last emission and the only one."""
    frames = frames_of(emissions)
    ends = [frame for frame in frames if isinstance(frame, StreamEnd)]
    assert ends == frames[-1:]
    return ends[0]


def generated(logged: Sequence[Emission]) -> dict[str, Any]:
    """Those fields of a StartRun that its generated ids are in."""
    ids: list[int] = []
    steered: list[IdSpan] = []
    for emission in logged:
        steered += [IdSpan(len(ids) + span.start, span.count) for span in emission.steered]
        ids += emission.ids
    return {"generated_ids": tuple(ids), "steered": tuple(steered)}


def continuation(fields: dict[str, Any], logged: Sequence[Emission]) -> StartRun:
    """Return the run that goes on from what a ledger holds, as the supervisor asks for it."""
    return make_run(
        **fields,
        **generated(logged),
        sent_bytes=len(text_of(logged).encode()),
        next_index=len(logged),
    )


def fallback_tokenizer() -> Tokenizer:
    """SentencePiece's kind: a space before the text, and bytes for what is no word; END is id 0."""
    words = [END, *(f"<0x{byte:02X}>" for byte in range(256)), "<unk>"]
    words += ["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "\u2581\u2581", "é"]
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab"), ("\u2581", "\u2581")]
    vocab = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([END])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def id_of_byte(byte: int) -> int:
    """Return the token of a byte in `fallback_tokenizer`."""
    return 1 + byte


def run_all(engine: Engine, runs: dict[int, StartRun]) -> dict[int, list[Emission]]:
    """Add runs, then step until the engine is idle; the emissions of each run."""
    for run_id, run in runs.items():
        engine.add(run_id, run)
    emitted: dict[int, list[Emission]] = defaultdict(list)
    while not engine.idle:
        for emission in engine.step():
            emitted[emission.run].append(emission)
    return emitted


def engine_of(model: Model, tokenizer: Tokenizer, limits: Limits | None = None) -> Engine:
    """Return an engine as a worker has it, with nothing but the model and its tokenizer around."""
    from tailrace.origin.engine.engine import Engine
    from tailrace.origin.engine.generation import ModelContext
    from tailrace.origin.models.model import StepDevice

    config = model.config
    around = ModelContext(tokenizer, config.eos_ids, config.context, config.vocab)
    device = model if isinstance(model, StepDevice) else None
    return Engine(model, around, limits, device=device)
