"""Items of speech on their way through other stages, processes and logs."""

from __future__ import annotations

import pickle

import pytest

from tailrace.origin.pipelines.item_json import items_json, parsed_items
from tailrace.origin.pipelines.moderation import Action
from tailrace.origin.pipelines.speech.items import Speech, Transcript, Word
from tailrace.origin.pipelines.stages.blocklist import Blocklist, BlocklistOptions
from tailrace.origin.producer import Data, Revision
from tests.origin.pipelines.staged import stage_of, synchronous

SPEECH = Speech(b"\0\xff", 3, 1_000, ends=True, is_cut=True, overlap_ms=600)
HEARD = Transcript("a b", False, 0.5, (Word("a", 0, 10), Word("b", 20, 30)), 40, is_cut=True)


@pytest.mark.parametrize("item", [SPEECH, HEARD])
def test_items_pass_logs_and_pipes_unchanged(item: Speech | Transcript) -> None:
    assert parsed_items(items_json([item])) == (item,)
    assert pickle.loads(pickle.dumps(item)) == item


def test_items_are_those_that_other_stages_know() -> None:
    assert isinstance(SPEECH, Data)
    assert isinstance(HEARD, Revision)


def test_a_blocklist_keeps_the_time_and_the_stability_of_a_result() -> None:
    options = BlocklistOptions(words=("b",), action=Action.MASK)
    made = synchronous(stage_of(Blocklist, options=options), [HEARD])
    assert made == [Transcript("a *", False, 0.5, HEARD.words, 40, is_cut=True)]
