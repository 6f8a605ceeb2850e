"""The proof that both sides of a link hold one secret."""

import pytest

from tailrace.ledger.errors import Unauthorized
from tailrace.ledger.frame import Challenge, Proof
from tailrace.ledger.wire.handshake import Handshake, Side

SECRET = b"a secret of two sides"


def pair(edge: bytes | None = SECRET, origin: bytes | None = SECRET) -> tuple[Handshake, Handshake]:
    return Handshake(Side.EDGE, edge), Handshake(Side.ORIGIN, origin)


def asked(side: Handshake) -> Challenge:
    challenge = side.challenge
    assert challenge is not None
    return challenge


def exchange(one: Handshake, two: Handshake) -> tuple[Proof, Proof]:
    return one.answer(asked(two)), two.answer(asked(one))


def test_two_sides_with_one_secret_are_sure_of_each_other() -> None:
    edge, origin = pair()
    proofs = exchange(edge, origin)
    origin.check(proofs[0])
    assert origin.done and not edge.done
    edge.check(proofs[1])
    assert edge.done


def test_without_a_secret_nothing_is_asked_for() -> None:
    edge, origin = pair(None, None)
    assert edge.challenge is None and origin.challenge is None
    assert edge.done and origin.done


def test_another_secret_is_refused() -> None:
    edge, origin = pair(edge=b"another")
    proof, _ = exchange(edge, origin)
    with pytest.raises(Unauthorized) as caught:
        origin.check(proof)
    assert caught.value.code == "link_refused"
    assert not origin.done


def test_ones_own_proof_sent_back_is_refused() -> None:
    """Somebody without the secret sends all that the origin sends back to it."""
    _, origin = pair()
    proof = origin.answer(asked(origin))
    with pytest.raises(Unauthorized):
        origin.check(proof)


def test_a_proof_of_an_earlier_connection_is_refused() -> None:
    edge, origin = pair()
    old, _ = exchange(edge, origin)
    again = Handshake(Side.ORIGIN, SECRET)
    again.answer(asked(edge))
    with pytest.raises(Unauthorized):
        again.check(old)


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_without_a_secret_says_so_to_one_that_asks(side: int) -> None:
    both = pair(edge=None if side == 0 else SECRET, origin=None if side == 1 else SECRET)
    with pytest.raises(Unauthorized, match="this one has none"):
        both[side].answer(asked(both[1 - side]))


def test_what_comes_out_of_turn_is_refused() -> None:
    edge, origin = pair()
    with pytest.raises(Unauthorized):
        edge.check(Proof(bytes(32)))
    edge.answer(asked(origin))
    with pytest.raises(Unauthorized):
        edge.answer(asked(origin))
