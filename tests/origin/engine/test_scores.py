"""Log probabilities in frames."""

from tailrace.ledger.frame import Score, ScoredToken, TokenScores, decode, encode
from tailrace.origin.engine.transcript import (
    MAX_FRAME_SCORE_BYTES,
    SCORE_BYTES,
    PendingScores,
    Vocabulary,
)
from tailrace.origin.models.model import Scores
from tests.origin.tiny_checkpoint import END, END_ID, train_tokenizer

TOKENIZER = train_tokenizer(300)
VOCABULARY = Vocabulary(TOKENIZER)


def test_scores_have_the_bytes_of_their_tokens_best_first() -> None:
    first, other, *_ = TOKENIZER.encode("狐").ids
    scored = VOCABULARY.scored(first, Scores(-0.5, ((other, -0.25), (first, -0.5), (END_ID, -3.0))))
    assert scored.chosen == Score(first, "狐".encode()[:1], -0.5)
    assert [score.logprob for score in scored.top] == [-0.25, -0.5, -3.0]
    assert scored.top[2].token == END.encode()


def test_a_drawn_token_need_not_be_among_the_best() -> None:
    scored = VOCABULARY.scored(5, Scores(-9.0, ()))
    assert scored == TokenScores(Score(5, b"%", -9.0), ())


def test_a_row_of_the_head_that_no_token_has_is_scored_without_bytes() -> None:
    assert VOCABULARY.scored(310, Scores(-1.0, ())).chosen == Score(310, b"", -1.0)


def test_scores_come_out_once_and_in_order() -> None:
    pending = PendingScores()
    scores = [VOCABULARY.scored(token, Scores(-1.0, ())) for token in (5, 6, 7)]
    for each in scores:
        pending.add(each)
    assert pending.take() == tuple(scores)
    assert pending.take() == ()


def test_a_score_takes_no_more_room_than_is_counted() -> None:
    score = Score((1 << 32) - 1, b"", -0.1)
    scores = TokenScores(score, (score,) * 20)
    one, two = (len(encode(ScoredToken("", (scores,) * n, 0))) for n in (1, 2))
    assert two - one <= 21 * SCORE_BYTES


def test_of_more_scores_than_fit_the_last_are_kept() -> None:
    pending = PendingScores()
    for at in range(MAX_FRAME_SCORE_BYTES // 1000 + 5):
        pending.add(TokenScores(Score(at, b"x" * (1000 - SCORE_BYTES), -1.0)))
    kept = pending.take()
    assert len(kept) == MAX_FRAME_SCORE_BYTES // 1000
    assert kept[-1].chosen.id == MAX_FRAME_SCORE_BYTES // 1000 + 4
    corr, frame = decode(encode(ScoredToken("a", kept, 0)))
    assert corr == 0 and isinstance(frame, ScoredToken)
