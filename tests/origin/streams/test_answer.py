"""Headers of answers: for browsers, for caches, and ETags."""

from pathlib import Path

import pytest

from tests.origin.streams.stream_world import streams_at

pytestmark = pytest.mark.anyio


async def test_every_answer_says_to_browsers_what_they_may_do_with_it(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        answers = [await world.put("a"), await world.put("a", content_type="text/html")]
        answers += [await world.ask(m, "a") for m in ("GET", "HEAD", "PATCH", "DELETE", "GET")]
    assert [answer.status for answer in answers] == [201, 409, 200, 200, 405, 204, 404]
    for answer in answers:
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("cross-origin-resource-policy") == "cross-origin"


async def test_the_etag_changes_with_the_end_and_with_closing(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"x")
        tags = [(await world.ask("GET", "a")).header("etag")]
        for body, closed in ((b"y", "false"), (b"", "true")):
            await world.post("a", body, stream_closed=closed)
            answer = await world.ask("GET", "a", if_none_match=tags[-1] or "")
            assert answer.status == 200
            tags.append(answer.header("etag"))
        assert len(set(tags)) == 3
        for sent in (tags[-1] or "", f'"other", W/{tags[-1]}', "*"):
            answer = await world.ask("GET", "a", if_none_match=sent)
            assert (answer.status, answer.body) == (304, b"")


async def test_only_what_cannot_change_is_cached(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("a", b"x")
        assert (await world.ask("GET", "a")).header("cache-control") == "no-cache"
        now = await world.ask("GET", "a", query="?offset=now")
        assert (now.header("cache-control"), now.header("etag")) == ("no-store", None)
        await world.post("a", b"", stream_closed="true")
        assert "max-age=60" in ((await world.ask("GET", "a")).header("cache-control") or "")
