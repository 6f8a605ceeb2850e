"""What is kept of an ended stream, behind the tokens of its StreamEnd."""

import pytest

from tailrace.ledger.frame import FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Record
from tailrace.ledger.stream_stats import UNKNOWN, StreamLife, tokens_of

END = encode(StreamEnd(3, FinishReason.STOP, 2, 4))
LIFE = StreamLife(3, 14, 1592, 6, 53, 58, resumes=2, takeovers=0)


@pytest.mark.parametrize("ids", [(), (7,), (7, 2**31 + 9)])
def test_it_lies_behind_the_tokens_that_the_end_completes(ids: tuple[int, ...]) -> None:
    record = Record(END, LIFE.behind(ids))
    assert StreamLife.of(record) == LIFE
    assert tokens_of(record) == ids
    assert max(record.ids) < 2**32  # what a ledger can hold


def test_a_record_without_one_has_only_tokens() -> None:
    for record in (Record(END, ()), Record(encode(Token("a", 0)), (1, 2))):
        assert StreamLife.of(record) is None
        assert tokens_of(record) == record.ids


def test_what_was_not_measured_or_does_not_fit_is_not_known() -> None:
    life = StreamLife(whole_ms=2**40, takeovers=1)
    found = StreamLife.of(Record(END, life.behind(())))
    assert found == life._replace(whole_ms=None)


def test_numbers_that_another_release_has_more_or_fewer_of_are_no_fault() -> None:
    ids = LIFE.behind(())
    assert StreamLife.of(Record(END, ids[:-2])) == LIFE._replace(resumes=None, takeovers=None)
    assert StreamLife.of(Record(END, (*ids, 5, UNKNOWN))) == LIFE
