"""Reports of usage: parses the parameters of a query, and writes its sums as a JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tailrace.ledger.errors import CallerError
from tailrace.ledger.usage import (
    DAY_MS,
    FILTERS,
    GROUPS,
    MAX_DAY,
    UsageCounts,
    UsageQuery,
    UsageSums,
    day_name,
)

NAMES = {"class": "priority"}
"""Maps names of groups and filters in the API to columns of other names."""


def parse_query(
    given: Mapping[str, str],
    now_ms: int,
    *,
    groups: Sequence[str] = GROUPS,
    filters: Sequence[str] = FILTERS,
) -> UsageQuery:
    """Return the query for parameters that are given as text: `by`, `from`, `to`, and filters.

    `by` is a list of groups, separated by commas. `from` and `to` are the first and the last day,
    such as 2026-11-28. By default there is one sum for each day up to today.

    Raises:
        CallerError: A parameter is unknown or not valid.
    """
    columns = {_shown(column): column for column in filters}
    known = {"by", "from", "to", *columns}
    for name in given:
        if name not in known:
            hint = "use " + ", ".join(sorted(known))
            raise CallerError(f"unknown parameter {name!r}", field=name, hint=hint)
    first_ms, after_ms = 0, None
    if "from" in given:
        first_ms = _day_ms(given["from"], "from")
    if "to" in given:
        after_ms = _day_ms(given["to"], "to") + DAY_MS
        if after_ms <= first_ms:
            raise CallerError(
                f"{given['to']} is before {given['from']}", field="to", hint="give a later day"
            )
    if first_ms > now_ms:
        raise CallerError(
            f"{given['from']} is in the future", field="from", hint="give a day up to today"
        )
    by = parse_groups(given.get("by", "day"), groups)
    where = {column: given[name] for name, column in columns.items() if name in given}
    return UsageQuery(by, first_ms, after_ms, where)


def parse_groups(text: str, groups: Sequence[str] = GROUPS) -> tuple[str, ...]:
    """Return the groups in a comma-separated list. An empty list asks for one sum of everything.

    Raises:
        CallerError: A name is unknown, or given twice.
    """
    shown = {_shown(name): name for name in groups}
    by: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part not in shown:
            hint = "use " + ", ".join(shown)
            raise CallerError(f"usage cannot be grouped by {part!r}", field="by", hint=hint)
        if shown[part] in by:
            raise CallerError(f"{part!r} is given twice", field="by", hint="give each group once")
        by.append(shown[part])
    return tuple(by)


def usage_document(query: UsageQuery, sums: UsageSums) -> dict[str, Any]:
    """Return the JSON document of the sums: a list of rows, and their total."""
    names = [_shown(name) for name in query.by]
    last = None if query.to_ms is None else day_name(query.to_ms // DAY_MS - 1)
    return {
        "by": names,
        "from": day_name(query.from_ms // DAY_MS) if query.from_ms else None,
        "to": last,
        "usage": [
            dict(zip(names, group, strict=True)) | counts._asdict() for group, counts in sums.rows
        ],
        "total": sums.total._asdict(),
    }


def sums_of(documents: Iterable[Mapping[str, Any]], query: UsageQuery) -> UsageSums:
    """Add up the documents that several ledgers have returned for the same query."""
    sums, names = UsageSums(query), [_shown(name) for name in query.by]
    for document in documents:
        for row in document["usage"]:
            group = tuple(str(row[name]) for name in names)
            sums.add_row(group, [int(row[count]) for count in UsageCounts._fields])
    return sums


def _shown(column: str) -> str:
    return next((name for name, of in NAMES.items() if of == column), column)


def _day_ms(text: str, field: str) -> int:
    try:
        moment = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
        if len(text) != 10 or not 0 <= moment.timestamp() < MAX_DAY * DAY_MS / 1000:
            raise ValueError
    except ValueError:
        raise CallerError(
            f"{text!r} is not a day", field=field, hint="write it as 2026-11-28 (UTC)"
        ) from None
    return int(moment.timestamp() * 1000)
