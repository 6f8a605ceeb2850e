"""The quotient and the root that stand for the compiler's: their instructions, computed exactly."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from math import isqrt

import pytest

from tailrace.kernels.linear.int8_words_triton import _QUOTIENT_ASM, _ROOT_ASM

_LINE = re.compile(r"^(\w+)[\w.]*\.f32 ([^;]+);", re.M)


def nearest(exact: Fraction) -> Fraction:
    """Return the fp32 number nearest to one within its normal range, half to even."""
    if not exact:
        return exact
    exponent = abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length()
    unit = Fraction(2) ** (exponent - 23)
    if abs(exact) < 2**23 * unit:
        unit /= 2
    return round(exact / unit) * unit  # Python rounds half to even as well


def near_root(square: Fraction) -> Fraction:
    """Return the root to 80 places: enough to round it to fp32, as no root is so close to a tie."""
    scale = 2**160
    return Fraction(isqrt(square.numerator * scale // square.denominator), 2**80)


def run(asm: str, error: int, *arguments: Fraction) -> Fraction:
    """$0 of the instructions, with approximations that are off by `error` units at the end."""
    values = {f"${place}": value for place, value in enumerate(arguments, 1)}
    values |= {"0f3F800000": Fraction(1), "0f3F000000": Fraction(1, 2)}
    for operation, operands in _LINE.findall(asm):
        target, *names = (name.strip() for name in operands.split(","))
        given = [values[name] for name in names]
        match operation:
            case "neg":
                result = -given[0]
            case "mul":
                result = nearest(given[0] * given[1])
            case "fma":
                result = nearest(given[0] * given[1] + given[2])
            case "rcp" | "rsqrt":
                exact = 1 / given[0] if operation == "rcp" else 1 / near_root(given[0])
                result = nearest(nearest(exact) * (1 + error * Fraction(1, 2**23)))
            case _:
                raise AssertionError(operation)
        values[target] = result
    return values["$0"]


def number(source: random.Random, exponents: range) -> Fraction:
    return (2**23 + source.randrange(2**23)) * Fraction(2) ** (source.choice(exponents) - 23)


@pytest.mark.parametrize("error", [-1, 0, 1])
def test_a_quotient_is_rounded_to_the_nearest(error: int) -> None:
    source = random.Random(error)
    for _ in range(1000):
        left, right = number(source, range(-14, 60)), number(source, range(-20, 60))
        assert run(_QUOTIENT_ASM, error, left, right) == nearest(left / right)
    for value in (Fraction(0), Fraction(1), number(source, range(1))):
        assert run(_QUOTIENT_ASM, error, value, Fraction(2560)) == nearest(value / 2560)


@pytest.mark.parametrize("error", [-1, 0, 1])
def test_a_root_is_rounded_to_the_nearest(error: int) -> None:
    source = random.Random(error)
    for _ in range(1000):
        square = number(source, range(-40, 104))
        assert run(_ROOT_ASM, error, square) == nearest(near_root(square))
