"""The roofline of an H200 as an SVG: what its memory and its arithmetic allow, and our kernels.

Williams, Waterman and Patterson, Roofline, 2009: an operation that does I operations for each
byte it moves cannot do more per second than I times the bandwidth, nor more than the peak of
the instructions it is made of. Both axes are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 560, 70, 40, 200, 60
X_RANGE = (-0.5, 3.5)
Y_RANGE = (11.5, 15.6)
"""Powers of ten: operations per byte, operations per second."""
COLOURS = {"ternary": "#b8530a", "int8": "#7a3fb0", "int4": "#a0276b", "bf16": "#1f6fb4"}
ATTENTION_COLOUR = "#2b8a3e"


@dataclass(frozen=True, slots=True)
class Point:
    """An operation: operations per byte, and operations per second."""

    name: str
    intensity: float
    expected: float
    measured: float | None

    @property
    def colour(self) -> str:
        """By the format of what is read."""
        if ".attend " in self.name:
            return ATTENTION_COLOUR
        return next((c for word, c in COLOURS.items() if f" {word} " in self.name), "#555555")


def draw(points: list[Point], bandwidth: float, peaks: dict[str, float], title: str) -> str:
    """The picture, as the text of an SVG file; the same text for the same numbers.

    bandwidth: bytes per second. peaks: operations per second, by the name of the instructions.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, f"Roofline of one H200: {title}", size=15),
        *_axes(),
        *_roofs(bandwidth, peaks),
        *(mark for point in points for mark in _marks(point)),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(intensity: float) -> float:
    share = (math.log10(intensity) - X_RANGE[0]) / (X_RANGE[1] - X_RANGE[0])
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(speed: float) -> float:
    share = (math.log10(speed) - Y_RANGE[0]) / (Y_RANGE[1] - Y_RANGE[0])
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, size: int = 12, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _axes() -> Iterator[str]:
    grid = 'stroke="#e4e4e4"'
    for power in range(math.ceil(X_RANGE[0]), math.floor(X_RANGE[1]) + 1):
        x = _x(10.0**power)
        yield _line(x, TOP, x, HEIGHT - BOTTOM, grid)
        yield _text(x, HEIGHT - BOTTOM + 18, f"{10**power}", more='text-anchor="middle"')
    for power in range(math.ceil(Y_RANGE[0]), math.floor(Y_RANGE[1]) + 1):
        y = _y(10.0**power)
        yield _line(LEFT, y, WIDTH - RIGHT, y, grid)
        label = f"{10 ** (power - 12):g} T"
        yield _text(LEFT - 8, y + 4, label, more='text-anchor="end"')
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, HEIGHT - 18, "operations per byte", more='text-anchor="middle"')
    turned = f'text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2})"'
    yield _text(18, HEIGHT / 2, "operations per second", more=turned)


def _roofs(bandwidth: float, peaks: dict[str, float]) -> Iterator[str]:
    start, roof = 10 ** X_RANGE[0], 'stroke="black" stroke-width="1.5"'
    end = max(peaks.values()) / bandwidth
    first = max(start, 10 ** Y_RANGE[0] / bandwidth)
    yield _line(_x(first), _y(first * bandwidth), _x(end), _y(end * bandwidth), roof)
    x, y = _x(1.0), _y(bandwidth)
    angle = math.degrees(math.atan2(_y(10 * bandwidth) - y, _x(10.0) - x))
    turn = f'transform="rotate({angle:.1f} {x:.1f} {y:.1f})"'
    yield _text(x, y - 6, f"memory: {bandwidth / 1e12:g} TB/s, copied", more=turn)
    for name, peak in peaks.items():
        y = _y(peak)
        yield _line(_x(peak / bandwidth), y, WIDTH - RIGHT, y, roof)
        yield _text(WIDTH - RIGHT + 6, y + 4, f"{name}, {peak / 1e12:.0f} T")


def _marks(point: Point) -> Iterator[str]:
    x, title = _x(point.intensity), f"<title>{escape(point.name)}</title>"
    circle = f'<circle cx="{x:.1f}" r="4" stroke="{point.colour}"'
    yield f'{circle} cy="{_y(point.expected):.1f}" fill="none">{title}</circle>'
    if point.measured:
        y = _y(point.measured)
        yield f'{circle} cy="{y:.1f}" fill="{point.colour}">{title}</circle>'


def _legend() -> Iterator[str]:
    x, y = WIDTH - RIGHT + 6, HEIGHT - BOTTOM - 130
    for place, (name, colour) in enumerate({**COLOURS, "attention": ATTENTION_COLOUR}.items()):
        yield f'<circle cx="{x + 6}" cy="{y + 18 * place}" r="4" fill="{colour}"/>'
        yield _text(x + 16, y + 18 * place + 4, name)
    yield _text(x, y + 98, "ring: expected")
    yield _text(x, y + 114, "disc: measured")
