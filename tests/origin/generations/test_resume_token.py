"""Resume tokens: what they allow, and forged ones."""

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import ConfigError, Forbidden, NotFound, TailraceError, Unauthorized
from tailrace.ledger.links.rights import Right
from tailrace.origin.generations.resume_tokens import TokenKeys

STREAM, OTHER = bytes([1]) * 16, bytes([2]) * 16
KEYS = TokenKeys({"k1": b"a" * 32, "k0": b"b" * 32})
ALL = Right.READ | Right.CANCEL


def test_a_token_gives_its_rights_on_its_stream_until_it_expires() -> None:
    token = KEYS.issue(STREAM, ALL, expires_ms=1000)
    KEYS.check(token, STREAM, Right.READ, now_ms=999)
    KEYS.check(token, STREAM, Right.CANCEL, now_ms=0)
    with pytest.raises(Unauthorized):
        KEYS.check(token, STREAM, Right.READ, now_ms=1000)


def test_reading_and_cancelling_are_separate_rights() -> None:
    token = KEYS.issue(STREAM, Right.READ, expires_ms=1000)
    with pytest.raises(Forbidden, match="cancel"):
        KEYS.check(token, STREAM, Right.CANCEL, now_ms=0)


def test_a_token_of_another_stream_is_answered_as_if_the_stream_were_absent() -> None:
    with pytest.raises(NotFound) as error:
        KEYS.check(KEYS.issue(OTHER, ALL, 1000), STREAM, Right.READ, now_ms=0)
    assert error.value.code == "unknown_stream"


def test_a_token_says_whose_stream_it_is_for() -> None:
    token = KEYS.issue(STREAM, ALL, 1000, tenant="acme")
    voucher = KEYS.check(token, STREAM, Right.READ, now_ms=0)
    assert (voucher.rights, voucher.expires_ms) == (ALL, 1000)
    assert [voucher.is_for(tenant) for tenant in ("acme", "other", "")] == [True, False, False]
    nobodys = KEYS.check(KEYS.issue(STREAM, ALL, 1000), STREAM, Right.READ, now_ms=0)
    assert [nobodys.is_for(tenant) for tenant in ("acme", "")] == [False, True]
    with pytest.raises(Unauthorized):  # the version is signed as well
        KEYS.check(token.replace("v2.", "v1.", 1), STREAM, Right.READ, now_ms=0)


def test_an_older_key_still_verifies_and_an_unknown_one_does_not() -> None:
    old = TokenKeys({"k0": b"b" * 32}).issue(STREAM, ALL, 1000)
    KEYS.check(old, STREAM, Right.READ, now_ms=0)
    with pytest.raises(Unauthorized):
        KEYS.check(TokenKeys({"kx": b"a" * 32}).issue(STREAM, ALL, 1000), STREAM, Right.READ, 0)


@given(st.data())
def test_every_changed_character_is_refused_with_one_text(data: st.DataObject) -> None:
    token = KEYS.issue(STREAM, ALL, 1000)
    at = data.draw(st.integers(0, len(token) - 1))
    character = data.draw(st.characters().filter(lambda c: c != token[at]))
    with pytest.raises(Unauthorized, match="the resume token is not valid"):
        KEYS.check(token[:at] + character + token[at + 1 :], STREAM, Right.READ, now_ms=0)


@given(st.one_of(st.text(max_size=80), st.just("v1." * 4000), st.just("v1.k1.." + "a" * 43)))
def test_rubbish_is_refused_and_raises_nothing_else(token: str) -> None:
    with pytest.raises(TailraceError) as error:
        KEYS.check(token, STREAM, Right.READ, now_ms=0)
    assert type(error.value) is Unauthorized


def test_keys_are_made_once_readable_by_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "data" / "keys.json"
    token = TokenKeys.load(path).issue(STREAM, ALL, 1000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    TokenKeys.load(path).check(token, STREAM, Right.READ, now_ms=0)


def test_two_origins_that_make_the_keys_at_once_have_the_same(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    quicker: list[TokenKeys] = []

    def random(count: int) -> bytes:
        if not quicker:
            quicker.append(TokenKeys.load(path))
        return bytes(count)

    token = TokenKeys.load(path, random).issue(STREAM, ALL, 1000)
    quicker[0].check(token, STREAM, Right.READ, now_ms=0)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"k": "abcd"}', '{"k": 3}', '{"k": "zz"}'])
def test_a_file_without_good_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        TokenKeys.load(path)


def test_a_new_first_key_signs(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"new": "11" * 32, "old": "22" * 32}))
    assert TokenKeys.load(path).issue(STREAM, ALL, 1000).startswith("v1.new.")


def test_a_place_where_no_keys_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^origin\.keys: .*: Not a directory"):
        TokenKeys.load(tmp_path / "file" / "folder" / "keys.json")
