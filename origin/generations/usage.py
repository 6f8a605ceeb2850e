"""Answers queries about usage: of all keys for operators, and of its own key for a caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.ledger.errors import CallerError, Forbidden
from tailrace.ledger.frame import Caller
from tailrace.ledger.interface import Ledger
from tailrace.ledger.usage import DAY_MS, UsageQuery, next_month_ms
from tailrace.ledger.usage_report import parse_query, usage_document
from tailrace.origin.generations.runs import Runs

Document = dict[str, Any]
MAX_ROWS = 10_000
"""Maximum rows of an answer, which an edge reads as a whole."""


async def usage_of_all(ledger: Ledger, query: Mapping[str, str], now_ms: int) -> Document:
    """Return the usage of all keys that a query asks for."""
    return await _document(ledger, parse_query(query, now_ms))


async def usage_of_key(
    ledger: Ledger, runs: Runs, caller: Caller | None, query: Mapping[str, str], now_ms: int
) -> Document:
    """Return the usage of the caller's key, and what it has spent in this day and month.

    Raises:
        Forbidden: The edge has no API keys, or the request has none.
    """
    if caller is None or not caller.key:
        raise Forbidden("usage is counted by API key, and this request has none")
    parsed = parse_query(query, now_ms)
    where = dict(parsed.choices) | {"key": caller.key}
    own = UsageQuery(parsed.by, parsed.from_ms, parsed.to_ms, where)
    document = await _document(ledger, own)
    await runs.spending.know(caller.key)
    running = runs.table.tokens_of(caller.key)
    spent = runs.core.budgets.spent(caller.key, running, now_ms)
    ends_ms = {"day": (now_ms // DAY_MS + 1) * DAY_MS, "month": next_month_ms(now_ms)}
    return document | {"spent": {"day": spent.day, "month": spent.month}, "ends_ms": ends_ms}


async def _document(ledger: Ledger, query: UsageQuery) -> Document:
    sums = await ledger.usage(query)
    if len(sums.rows) > MAX_ROWS:
        raise CallerError(
            f"{len(sums.rows)} rows are too many for one answer",
            field="by",
            hint=f"at most {MAX_ROWS}: ask for fewer days or groups, or use `tailrace usage`",
        )
    return {"ledger": ledger.name, **usage_document(query, sums)}
