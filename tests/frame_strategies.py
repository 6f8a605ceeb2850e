"""Hypothesis strategies for every frame class, derived from its annotations."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import IntEnum
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

U64_MAX = 2**64 - 1

# The values on both sides of every change of length, which plain integers rarely hit.
_EDGES = sorted({n for k in range(1, 10) for n in (2 ** (7 * k) - 1, 2 ** (7 * k))})
UINTS = st.one_of(
    st.integers(0, 300), st.sampled_from([0, *_EDGES, U64_MAX]), st.integers(0, U64_MAX)
)
TEXTS = st.text(max_size=40)
CORRS = st.integers(0, 2**32 - 1)

# NaN is left out: it equals nothing, not even what it decodes to. The vectors have it.
_BY_BARE_NAME: dict[str, st.SearchStrategy[Any]] = {
    "uint": UINTS,
    "u16": st.integers(0, 2**16 - 1),
    "u32": st.integers(0, 2**32 - 1),
    "u64": st.integers(0, U64_MAX),
    "list<u32>": st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    "f32": st.floats(width=32, allow_nan=False),
    "f64": st.floats(allow_nan=False),
    "StreamId": st.binary(min_size=16, max_size=16),
    "data[8]": st.binary(min_size=8, max_size=8),
    "data[32]": st.binary(min_size=32, max_size=32),
}
_PLAIN = {str: TEXTS, bool: st.booleans(), bytes: st.binary(max_size=40), NoneType: st.none()}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of one annotation."""
    if get_origin(hint) is Annotated:
        plain, of = get_args(hint)
        return _BY_BARE_NAME[of.name] if of.name in _BY_BARE_NAME else values(plain)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=4).map(tuple)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return frames_of(hint)
    return st.one_of(*map(values, get_args(hint)))


def frames_of(cls: type) -> st.SearchStrategy[Any]:
    """Instances of one dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in fields(cls)})


def any_frame(table: dict[int, Any]) -> st.SearchStrategy[Any]:
    """Frames of every class of a table of tags, each as likely as any other."""
    return st.one_of(*map(frames_of, table.values()))
