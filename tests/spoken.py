"""Speech for tests, made by espeak-ng: 16 kHz mono 16-bit little-endian PCM."""

from __future__ import annotations

import io
import math
import random
import struct
import subprocess
import wave
from functools import cache

from tests.needs import needs_program

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RATE = 16_000
NOISE = 8
"""Standard deviation of the noise of a quiet room, of 32,768."""
_TAPS = 12
"""Number of samples on each side of a resampled one that count."""

needs_espeak = needs_program("espeak-ng", "on Debian or Ubuntu: apt-get install espeak-ng")


def captions(processes: int = 1) -> str:
    """Return the settings of a pipeline `captions` that hears digits."""
    return f"""
[pipelines.captions]
input = "pcm"
[[pipelines.captions.stages]]
stage = "voice-activity"
[[pipelines.captions.stages]]
stage = "transcribe"
processes = {processes}
words = {list(DIGITS)}
[[pipelines.captions.stages]]
stage = "punctuate"
optional = true
[[pipelines.captions.stages]]
stage = "debounce"
"""


@cache
def say(text: str, voice: str = "en-gb", speed: int = 150) -> bytes:
    """Return a text as sound, with half a second of quiet before it and a second after it."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "--stdout", text]
    made = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    with wave.open(io.BytesIO(made)) as file:
        data = file.readframes(file.getnframes())
        rate = file.getframerate()
    samples = _resampled(struct.unpack(f"<{len(data) // 2}h", data), rate)
    return noisy([0] * (RATE // 2) + samples + [0] * RATE)


def noisy(samples: list[int], sigma: float = NOISE) -> bytes:
    """Return samples with noise, as PCM."""
    noise = random.Random(len(samples))
    loud = (round(sample + noise.gauss(0, sigma)) for sample in samples)
    return struct.pack(f"<{len(samples)}h", *(max(-32768, min(32767, one)) for one in loud))


def louder(pcm: bytes, factor: float) -> bytes:
    """Return PCM with all samples multiplied, and clipped."""
    samples = struct.unpack(f"<{len(pcm) // 2}h", pcm)
    loud = (max(-32768, min(32767, round(one * factor))) for one in samples)
    return struct.pack(f"<{len(samples)}h", *loud)


def digits(seed: int, count: int) -> str:
    """Return digits in words."""
    return " ".join(random.Random(seed).choices(DIGITS, k=count))


def wrong_words(said: str, heard: str) -> int:
    """Return how many words were changed, added or left out."""
    right, words = said.split(), heard.split()
    costs = list(range(len(words) + 1))
    for row, one in enumerate(right, 1):
        before, costs[0] = costs[0], row
        for at, other in enumerate(words, 1):
            before, costs[at] = (
                costs[at],
                min(costs[at] + 1, costs[at - 1] + 1, before + (one != other)),
            )
    return costs[-1]


def _resampled(samples: tuple[int, ...], rate: int) -> list[int]:
    """Return samples at 16 kHz, by a windowed sinc for each phase."""
    if rate == RATE:
        return list(samples)
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    cutoff = 0.9 * min(1.0, RATE / rate)
    phases = [_filter(phase / up, cutoff) for phase in range(up)]
    padded = (0,) * _TAPS + samples + (0,) * _TAPS
    made = []
    for at in range(len(samples) * up // down):
        place, phase = divmod(at * down, up)
        near = padded[place : place + 2 * _TAPS]
        made.append(round(sum(map(float.__mul__, phases[phase], map(float, near)))))
    return made


def _filter(offset: float, cutoff: float) -> list[float]:
    """Return the weights of the samples around a place `offset` after the middle one."""
    weights = []
    for tap in range(2 * _TAPS):
        away = tap - _TAPS - offset
        sinc = math.sin(math.pi * cutoff * away) / (math.pi * away) if away else cutoff
        weights.append(sinc * (0.5 + 0.5 * math.cos(math.pi * away / (_TAPS + 1))))
    return weights
