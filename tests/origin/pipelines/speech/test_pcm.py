"""The format of sound: pieces of any size, the headers of WAV files, and what is refused."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError
from tailrace.origin.pipelines.speech.pcm import MAX_HEADER_BYTES, PcmReader
from tests.origin.pipelines.speech.heard import pieces

SAMPLES = bytes(range(1, 41))


def read(data: bytes, cuts: Iterable[int] = ()) -> tuple[bytes, bool]:
    """Return the samples of `data`, and whether it ends inside one."""
    reader = PcmReader()
    samples = b"".join(map(reader.feed, pieces(data, cuts))) + reader.finish()
    return samples, reader.is_cut


def wav(channels: int = 1, rate: int = 16_000, width: int = 2, samples: bytes = SAMPLES) -> bytes:
    """Return a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setframerate(rate)
        writer.setsampwidth(width)
        writer.writeframes(samples)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a WAV file."""
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


FORMAT = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
SOME = st.lists(st.integers(0, 120), max_size=6)


@given(st.binary(max_size=60), SOME)
def test_samples_are_whole_in_any_cut(data: bytes, cuts: list[int]) -> None:
    samples, is_cut = read(data, cuts)
    assert samples == data[: len(data) // 2 * 2]
    assert is_cut == (len(data) % 2 == 1)


@given(SOME)
def test_the_header_of_a_wav_file_is_left_out_in_any_cut(cuts: list[int]) -> None:
    assert read(wav(), cuts) == (SAMPLES, False)


@given(SOME)
def test_other_chunks_around_the_samples_are_left_out(cuts: list[int]) -> None:
    names = chunk(b"LIST", b"INFOodd")
    file = names + chunk(b"fmt ", FORMAT) + names + chunk(b"data", SAMPLES) + names
    assert read(b"RIFF\0\0\0\0WAVE" + file, cuts) == (SAMPLES, False)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_wav_file_of_unknown_length_is_read_to_its_end(size: int) -> None:
    head = b"RIFF\xff\xff\xff\xffWAVE" + chunk(b"fmt ", FORMAT) + b"data" + struct.pack("<I", size)
    assert read(head + SAMPLES) == (SAMPLES, False)


def test_the_extensible_form_of_pcm_is_read() -> None:
    extensible = struct.pack("<HHIIHH", 0xFFFE, 1, 16_000, 32_000, 2, 16)
    extensible += struct.pack("<HHI", 22, 16, 4) + struct.pack("<H", 1) + bytes(14)
    file = b"RIFF\0\0\0\0WAVE" + chunk(b"fmt ", extensible) + chunk(b"data", SAMPLES)
    assert read(file) == (SAMPLES, False)


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (wav(rate=44_100), "44100 Hz, not 16000"),
        (wav(channels=2), "2 channels, not 1"),
        (wav(width=1), "8 bits per sample, not 16"),
        (wav(rate=8_000, channels=2), "2 channels, not 1, 8000 Hz, not 16000"),
        (wav().replace(b"\1\0\1\0", b"\7\0\1\0", 1), "the encoding 7, not PCM"),
        (b"RIFF\0\0\0\0AVI " + bytes(20), "RIFF without WAVE"),
        (b"RIFF\0\0\0\0WAVE" + chunk(b"data", SAMPLES), "does not say its format"),
        (b"RIFF\0\0\0\0WAVE" + chunk(b"fmt ", b"short") + bytes(20), "is cut off"),
        (b"RIFF\0\0\0\0WAVE" + b"LIST" + struct.pack("<I", MAX_HEADER_BYTES), "header"),
        (b"OggS\0\2" + bytes(20), "the input is Ogg"),
        (b"\x1a\x45\xdf\xa3" + bytes(20), "the input is WebM"),
        (b"fLaC" + bytes(20), "the input is FLAC"),
        (b"ID3\3" + bytes(20), "the input is MP3"),
        (b"\0\0\0\x20ftypM4A " + bytes(20), "the input is MP4"),
    ],
)
@pytest.mark.parametrize("cuts", [(), range(200)])
def test_other_formats_are_refused_by_name(file: bytes, fault: str, cuts: Iterable[int]) -> None:
    with pytest.raises(CallerError, match=fault) as refused:
        read(file, cuts)
    assert "send 16-bit little-endian PCM" in (refused.value.hint or "")


def test_a_header_that_never_ends_is_no_sound() -> None:
    assert read(wav()[:30]) == (b"", True)
