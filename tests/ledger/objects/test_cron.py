"""Cron expressions: which there are, and when they come."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tailrace.ledger.objects import cron


@pytest.mark.parametrize(
    "expression",
    [
        "* * * * *",
        "*/30 0-6/2 1,15 jan-MAR,12 mon-fri",
        "0 0 L * 6L",
        "59 23 LW * friL",
        "0 15 15W * 2#1",
        "0 0 * * sun",
    ],
)
def test_a_cron_is_what_cloudflare_takes(expression: str) -> None:
    cron.check(expression)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("* * * *", "has 4 fields, not five"),
        ("60 * * * *", "field 1, minute: '60' is not in 0-59"),
        ("* 24 * * *", "field 2, hour: "),
        ("* * 0 * *", "field 3, day of the month: "),
        ("* * * 13 *", "field 4, month: '13' is not in 1-12 or jan-dec"),
        ("* * * * 0", "field 5, day of the week: '0' is not in 1-7 or sun-sat"),
        ("*/0 * * * *", "a step is 1-59"),
        ("5-1 * * * *", "ends before it begins"),
        ("1, * * * *", "'' is not in"),
        ("* * 32W * *", "'32' is not in 1-31"),
        ("* * * * 2#6", "'2#6' is not in"),
        ("\u0661 * * * *", "is not in 0-59"),
    ],
)
def test_a_bad_cron_is_named_by_its_field(expression: str, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        cron.check(expression)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("expression", "times"),
    [
        ("*/20 * * * *", ["2026-01-30 10:20", "2026-01-30 10:40", "2026-01-30 11:00"]),
        ("5/30 10,22 * * *", ["2026-01-30 10:05", "2026-01-30 10:35", "2026-01-30 22:05"]),
        ("0 0 L * *", ["2026-01-31 00:00", "2026-02-28 00:00", "2026-03-31 00:00"]),
        ("0 0 LW * *", ["2026-02-27 00:00", "2026-03-31 00:00"]),
        ("0 0 1W * *", ["2026-02-02 00:00", "2026-03-02 00:00", "2026-04-01 00:00"]),
        ("0 0 31W * *", ["2026-03-31 00:00", "2026-05-29 00:00"]),
        ("0 0 * * 1", ["2026-02-01 00:00", "2026-02-08 00:00"]),  # Sundays
        ("0 0 * * L", ["2026-01-31 00:00"]),  # a Saturday
        ("0 0 * * friL", ["2026-02-27 00:00", "2026-03-27 00:00"]),
        ("0 0 * feb 2#1", ["2026-02-02 00:00", "2027-02-01 00:00"]),
        ("0 0 29 2 *", ["2028-02-29 00:00", "2032-02-29 00:00"]),
        ("0 0 15 * mon", ["2026-02-02 00:00", "2026-02-09 00:00", "2026-02-15 00:00"]),
    ],
)
def test_a_cron_comes_when_it_says(expression: str, times: list[str]) -> None:
    at_ms: int | None = _ms("2026-01-30 10:00")  # a Friday
    for time in times:
        assert at_ms is not None
        at_ms = cron.next_after(expression, at_ms)
        assert at_ms == _ms(time)


def test_what_no_calendar_has_never_comes() -> None:
    assert cron.next_after("0 0 30 2 *", 0) is None


def _ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)
