from hypothesis import given
from hypothesis import strategies as st

from ledger.streams.config import Config, Create, ForkOrder, Part
from ledger.streams.expiry import Expiry
from ledger.streams.offset import Offset

ids = st.binary(min_size=16, max_size=16)
counts = st.integers(0, 10**15)
expiries = st.builds(Expiry, ttl_s=st.none() | counts, at_ms=st.none() | counts)
offsets = st.builds(Offset, counts, counts)
orders = st.builds(ForkOrder, st.text(min_size=1), st.none() | offsets, counts)
asked = st.builds(Create, st.none() | st.text(), expiries, st.booleans(), st.none() | orders)
parts = st.lists(st.builds(Part, ids, counts)).map(tuple)
configs = st.builds(Config, ids, st.text(), asked, expiries, parts, st.booleans())


@given(configs)
def test_a_configuration_is_unpacked_as_it_was_packed(config: Config) -> None:
    assert Config.unpack(config.pack()) == config


def test_a_fork_counts_on_from_what_it_has_inherited() -> None:
    config = Config(
        bytes(16), "text/plain", Create(), parts=(Part(bytes(16), 3), Part(bytes(16), 7))
    )
    assert config.base == 7
    assert Config(bytes(16), "text/plain", Create()).base == 0
