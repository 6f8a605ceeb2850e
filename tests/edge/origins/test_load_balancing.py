"""Which origin is asked: properties over any fleet, and the cases that have names."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from tailrace.edge.origins.load_balancing import (
    LOAD_SLACK,
    SHARED,
    STREAMS_SLACK,
    Candidate,
    Needs,
    by_key,
    choose,
    ledger_of,
)

ADDRESSES = [f"10.0.0.{n}:8470" for n in range(6)]
MODELS = st.lists(st.sampled_from(["a", "b"]), unique=True).map(tuple)


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    count = draw(st.integers(1, len(ADDRESSES)))
    return [
        Candidate(
            address,
            up=draw(st.booleans()),
            ready=draw(st.booleans()),
            allowed=draw(st.booleans()),
            models=draw(MODELS),
            cold=frozenset(draw(MODELS)),
            ledger=draw(st.sampled_from(["", "postgresql:1", "file:1", "file:2"])),
            streams=draw(st.integers(0, 300)),
            room=draw(st.sampled_from([0, 64, 256])),
        )
        for address in ADDRESSES[:count]
    ]


WANTED = st.builds(
    Needs,
    key=st.none() | st.binary(max_size=8),
    model=st.sampled_from([None, "a", "b", "c"]),
    spreads=st.booleans(),
    named=st.booleans(),
)


@given(fleets(), WANTED, st.frozensets(st.sampled_from(ADDRESSES)))
def test_who_is_chosen_is_up_and_new_and_the_same_each_time(
    fleet: list[Candidate], needs: Needs, tried: frozenset[str]
) -> None:
    chosen = choose(fleet, needs, tried)
    assert chosen == choose(fleet, needs, tried)
    assert chosen == choose(fleet[::-1], needs, tried) or needs.key is None
    if chosen is not None:
        assert chosen.up and chosen.address not in tried
    elif not needs.named:
        assert all(not c.up or c.address in tried for c in fleet)


@given(fleets(), WANTED)
def test_nobody_without_the_model_or_not_ready_is_asked_while_another_has_it_and_is(
    fleet: list[Candidate], needs: Needs
) -> None:
    chosen = choose(fleet, replace(needs, named=False))
    assume(chosen is not None)
    assert chosen is not None
    here = [c for c in fleet if c.up and c.allowed] or [c for c in fleet if c.up]
    assert chosen in here
    having = [c for c in here if needs.model in c.models] or here
    assert chosen in having
    assert chosen.ready or not any(c.ready for c in having)


@given(fleets(), st.binary(max_size=8))
def test_a_new_stream_never_goes_to_who_has_much_more_to_do(
    fleet: list[Candidate], key: bytes
) -> None:
    fleet = [replace(c, up=True, ready=True, allowed=True, room=256) for c in fleet]
    chosen = choose(fleet, Needs(key, spreads=True))
    assert chosen is not None
    average = sum(c.streams for c in fleet) / len(fleet)
    least = min(c.streams for c in fleet)
    most = average * (1 + LOAD_SLACK) + STREAMS_SLACK
    assert chosen.streams < most or chosen.streams == least


@given(st.binary(max_size=8), st.integers(0, 5))
def test_of_an_origin_that_goes_only_its_own_keys_move(key: bytes, gone: int) -> None:
    fleet = [Candidate(address, room=256) for address in ADDRESSES]
    own = choose(fleet, Needs(key))
    rest = [replace(c, up=c.address != ADDRESSES[gone]) for c in fleet]
    after = choose(rest, Needs(key))
    assert own is not None and after is not None
    assert after.address == own.address or own.address == ADDRESSES[gone]
    assert after.address == next(c.address for c in by_key(fleet, key) if c != fleet[gone])


def test_keys_are_spread_over_all_origins() -> None:
    fleet = [Candidate(address, room=256) for address in ADDRESSES[:3]]
    chosen = [choose(fleet, Needs(b"prompt %d" % n, spreads=True)) for n in range(300)]
    counts = [sum(c == one for c in chosen) for one in fleet]
    assert min(counts) > 60


def test_without_a_key_who_has_least_to_do_is_asked() -> None:
    fleet = [Candidate("a:1", streams=5, room=10), Candidate("b:1", streams=9, room=100)]
    chosen = choose(fleet, Needs(model="m", spreads=True))
    assert chosen == fleet[1]


def test_a_prefix_stays_where_it_is_while_loads_are_alike_and_no_longer() -> None:
    fleet = [Candidate(address, room=256) for address in ADDRESSES[:3]]
    own = choose(fleet, Needs(b"prefix", spreads=True))
    assert own is not None
    busy = [replace(c, streams=10 if c == own else 8) for c in fleet]
    chosen = choose(busy, Needs(b"prefix", spreads=True))
    assert chosen is not None and chosen.address == own.address
    overrun = [replace(c, streams=60 if c == own else 8) for c in fleet]
    chosen = choose(overrun, Needs(b"prefix", spreads=True))
    assert chosen is not None and chosen.address != own.address


@given(fleets(), st.binary(max_size=8))
def test_an_object_is_in_one_ledger_whoever_is_up(fleet: list[Candidate], key: bytes) -> None:
    ledgers = {
        ledger_of([replace(c, up=bool(n >> i & 1)) for i, c in enumerate(fleet)], key)
        for n in range(4)
    }
    assert len(ledgers) == 1
    [ledger] = ledgers
    chosen = choose(fleet, Needs(key, named=True))
    assert chosen is None or chosen.ledger == ledger


def test_an_origin_that_was_never_heard_shares_the_others_ledger_if_that_can_be_shared() -> None:
    shared = [Candidate("a:1", up=False), Candidate("b:1", ledger=SHARED + "x")]
    assert {ledger_of(shared, b"%d" % n) for n in range(50)} == {SHARED + "x"}
    alone = [Candidate("a:1", up=False), Candidate("b:1", ledger="file:x")]
    assert {ledger_of(alone, b"%d" % n) for n in range(50)} == {None, "file:x"}


def test_what_is_in_one_ledger_is_asked_of_nobody_else() -> None:
    fleet = [Candidate("a:1", ledger="file:a"), Candidate("b:1", ledger="file:b")]
    assert choose(fleet, Needs(b"stream"), ledger="file:b") == fleet[1]
    assert choose([fleet[0]], Needs(b"stream"), ledger="file:b") is None


def test_a_new_stream_goes_where_its_model_is_warm_however_busy_that_is() -> None:
    cold, warm = (
        Candidate(address, models=("a", "b"), cold=frozenset(names), room=64, streams=streams)
        for address, names, streams in ((ADDRESSES[0], "a", 0), (ADDRESSES[1], "b", 60))
    )
    assert choose([cold, warm], Needs(model="a", spreads=True)) == warm
    assert choose([cold, warm], Needs(b"key", "b", spreads=True)) == cold
    # One that is not ready is no better for being warm, and a stream is read where it is.
    assert choose([cold, replace(warm, ready=False)], Needs(model="a", spreads=True)) == cold
    assert choose([cold, warm], Needs(model="a")) == cold
