"""Recipes: the same from their text, whatever version wrote that."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import pytest
from pydantic import ValidationError

from tailrace.origin.generations.recipe import Recipe, packed_ids
from tailrace.origin.generations.stream_log import History
from tailrace.origin.workers.worker_frame import StartRun, decode, encode
from tests.origin.stage import RECIPE

LONG = 1 << 20
"""Token ids, of the longest prompt that a request can hold."""

Made = TypeVar("Made")


def with_prompt(ids: tuple[int, ...]) -> Recipe:
    return RECIPE.model_copy(update={"prompt_ids": packed_ids(ids)})


@pytest.mark.parametrize("ids", [(), (0,), (5, 6, 2**32 - 1), tuple(range(70_000))])
def test_it_comes_back_from_its_text_and_goes_to_a_worker(ids: tuple[int, ...]) -> None:
    recipe = with_prompt(ids)
    again = Recipe.model_validate_json(recipe.model_dump_json())
    assert again == recipe
    _, run = decode(encode(again.run(History())))
    assert isinstance(run, StartRun)
    assert run.prompt_ids == ids


def test_one_that_an_older_version_wrote_as_numbers_is_read() -> None:
    old = json.loads(RECIPE.model_dump_json()) | {"prompt_ids": [5, 6]}
    assert Recipe.model_validate_json(json.dumps(old)) == RECIPE


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], 7, "AAA", "AAAAAAA=", None])
def test_what_holds_no_ids_is_refused(ids: object) -> None:
    bad = json.loads(RECIPE.model_dump_json()) | {"prompt_ids": ids}
    with pytest.raises(ValidationError, match="prompt_ids"):
        Recipe.model_validate_json(json.dumps(bad))


def memory_of(make: Callable[[], Made]) -> tuple[Made, int]:
    """Return what is made, and the most bytes that this took at a time."""
    tracemalloc.start()
    try:
        return make(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_prompt_is_stored_read_and_sent_without_a_number_for_each_id() -> None:
    """Each would take 36 bytes, and a million of them a tenth of a second of the event loop."""
    recipe = with_prompt(tuple(range(LONG)))
    text, storing = memory_of(recipe.model_dump_json)
    again, reading = memory_of(lambda: Recipe.model_validate_json(text))
    _, sending = memory_of(lambda: encode(again.run(History())))
    assert max(storing, reading, sending) < 24 * LONG
