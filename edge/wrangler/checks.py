"""Checks of the values of a wrangler file's keys.

They report values that wrangler refuses, and also wrong values that wrangler accepts silently or
with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import date
from typing import NamedTuple

from tailrace.ledger.objects import cron
from tailrace.ledger.validation import closest_name

Table = Mapping[str, object]
NAME = re.compile(r"[a-z0-9_][a-z0-9_-]*")
ROUTE_PATHS = ("", "*", "/*", "/v1/*")
"""The paths that a route in the file may have. An edge serves its API under /v1/ only, and cannot
serve it at another path."""
DEV = (
    "ip port local_protocol inspector_port inspector_ip upstream_protocol host enable_containers"
    " container_engine generate_types"
).split()
MIGRATION = ("tag", "new_sqlite_classes", "renamed_classes", "deleted_classes", "new_classes")
BINDING = ("name", "class_name", "script_name", "environment")
MAX_PORT = 65_535


class Problem(NamedTuple):
    """A fault in the file.

    `path` is the path of the key, such as `triggers.crons.0`, from the top level of the file or of
    an environment on.
    """

    path: str
    message: str
    hint: str


Problems = Iterator[Problem]
Check = Callable[[object, str], Problems]


def unknown(table: Table, known: Collection[str], path: str = "") -> Problems:
    """Yield a problem for each key of `table` that is not in `known`."""
    for name in (name for name in table if name not in known):
        closest = closest_name(name, known)
        hint = f"did you mean {closest}?" if closest else "known are " + ", ".join(known)
        yield Problem(f"{path}.{name}".lstrip("."), "unknown key", hint)


def table(hint: str, *known: str) -> Callable[[Callable[[Table, str], Problems]], Check]:
    """Decorate the check of a table, so that it also reports a value that is not a table.

    If `known` keys are given, it reports all other keys, too.
    """

    def checks(check: Callable[[Table, str], Problems]) -> Check:
        def checked(value: object, path: str) -> Problems:
            if not isinstance(value, dict):
                yield Problem(path, "must be a table", hint)
                return
            yield from unknown(value, known, path) if known else ()
            yield from check(value, path)

        return checked

    return checks


def name_of(value: object, path: str) -> Problems:
    """Check the name of a Worker."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        yield Problem(
            path,
            "is not a valid name of a Worker",
            "write lower-case letters, digits, - and _ in quotes",
        )


def text(value: object, path: str) -> Problems:
    """Check that a value is a string and not empty."""
    if not isinstance(value, str) or not value:
        yield Problem(
            path, "must be a string that is not empty", 'write it in quotes, such as "src/index.ts"'
        )


def texts(value: object, path: str) -> Problems:
    """Check that a value is an array of strings."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        yield Problem(path, "must be an array of strings", 'write ["one", "two"]')


def compatibility_date(value: object, path: str) -> Problems:
    """Check that a value is an existing date, written as a text such as `2026-01-31`."""
    try:
        if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\d", value):
            raise ValueError("must be a string that holds a date")
        date.fromisoformat(value)
    except ValueError as error:
        yield Problem(path, str(error), 'write an existing date, such as "2026-01-31"')


@table("write [vars] or {…}")
def variables(value: Table, path: str) -> Problems:
    """Check the value of the key `vars`."""
    for name, one in value.items():
        if isinstance(one, date):  # a TOML date or time, which wrangler does not support either
            yield Problem(f"{path}.{name}", "is a date", "write it in quotes")


@table('write {required = ["NAME"]}', "required")
def secrets(value: Table, path: str) -> Problems:
    """Check the value of the key `secrets`."""
    yield from texts(value.get("required", []), f"{path}.required")


def routes(value: object, path: str) -> Problems:
    """Check the value of the key `routes`."""
    if not isinstance(value, list):
        yield Problem(path, "must be an array", 'write ["api.example.com/*"], or route')
        return
    for index, one in enumerate(value):
        yield from route(one, f"{path}.{index}")


def route(value: object, path: str) -> Problems:
    """Check one route."""
    pattern = value.get("pattern") if isinstance(value, dict) else value
    if not isinstance(pattern, str):
        yield Problem(path, "is not a route", 'write "api.example.com/*" or {pattern = …}')
        return
    if isinstance(value, dict):
        known = ("pattern", "zone_id", "zone_name", "custom_domain", "enabled", "previews_enabled")
        yield from unknown(value, known, path)
    host, tail = host_and_path(pattern)
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)*", host):
        hint = "write one route for each name; edge.hosts has no wildcards and no ports"
        yield Problem(path, f"{host!r} is not one host name", hint)
    elif isinstance(value, dict) and value.get("custom_domain") and tail:
        yield Problem(path, "a custom domain has no path", f'write "{host}"')
    elif tail not in ROUTE_PATHS:
        yield Problem(path, f"{tail!r}: this edge serves only /v1/", f'write "{host}/*"')


def host_and_path(pattern: str) -> tuple[str, str]:
    """Return the host and the path of a route's pattern; in `example.com*` the path is `*`."""
    bare = re.sub(r"^https?://", "", pattern)
    host, slash, tail = bare.partition("/")
    if not slash and len(host) > 1 and host.endswith("*"):
        return host[:-1].lower(), "*"
    return host.lower(), slash + tail


@table('write {crons = ["*/5 * * * *"]}', "crons")
def triggers(value: Table, path: str) -> Problems:
    """Check the value of the key `triggers`."""
    crons = value.get("crons", [])
    if (found := list(texts(crons, f"{path}.crons"))) or not isinstance(crons, list):
        yield from found
        return
    for index, expression in enumerate(crons):
        try:
            cron.check(expression)
        except ValueError as error:
            yield Problem(f"{path}.crons.{index}", str(error), 'write such as "*/5 * * * *"')


@table("write {cpu_ms = 100}", "cpu_ms", "subrequests")
def limits(value: Table, path: str) -> Problems:
    """Check the value of the key `limits`."""
    for name in value:
        if name in ("cpu_ms", "subrequests") and not _is_whole(value[name], 1, 2**31):
            yield Problem(f"{path}.{name}", "must be a whole number from 1 on", "write such as 100")


def observability(value: object, path: str) -> Problems:
    """Check the value of the key `observability`."""
    yield from _observed("logs", "traces")(value, path)
    if isinstance(value, dict):
        of_each, logs = ("persist", "destinations"), value.get("logs", {})
        yield from _observed(*of_each, "invocation_logs")(logs, f"{path}.logs")
        yield from _observed(*of_each)(value.get("traces", {}), f"{path}.traces")


def _observed(*known: str) -> Check:
    shared = ("enabled", "head_sampling_rate")
    return table("write {enabled = true}", *shared, *known)(_rates)


def _rates(value: Table, path: str) -> Problems:
    for name in ("enabled", "persist", "invocation_logs"):
        if not isinstance(value.get(name, True), bool):
            yield Problem(f"{path}.{name}", "must be true or false", "write true or false")
    rate = value.get("head_sampling_rate", 1)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        yield Problem(f"{path}.head_sampling_rate", "must be 0 to 1", "write such as 0.1")


@table("write {port = 8787}", *DEV)
def dev(value: Table, path: str) -> Problems:
    """Check the value of the key `dev`."""
    if not _is_whole(value.get("port", 0), 0, MAX_PORT):
        yield Problem(f"{path}.port", f"must be 0 to {MAX_PORT}", "write such as 8787")
    yield from text(value.get("ip", "localhost"), f"{path}.ip")
    if value.get("local_protocol", "http") not in ("http", "https"):
        yield Problem(f"{path}.local_protocol", 'must be "http" or "https"', 'write "http"')


def durable_objects(value: object, path: str) -> Problems:
    """Check the value of the key `durable_objects`."""
    if not isinstance(value, dict) or not _are_tables(value.get("bindings")):
        yield Problem(path, "has no array of bindings", "write {bindings = [{name, class_name}]}")
        return
    yield from unknown(value, ("bindings",), path)
    names: set[str] = set()
    for index, one in enumerate(bindings_of(value)):
        here = f"{path}.bindings.{index}"
        yield from unknown(one, BINDING, here)
        for name in ("name", "class_name"):
            yield from text(one.get(name), f"{here}.{name}")
        for name in (name for name in BINDING[2:] if name in one):
            hint = "name a class of this Worker, and remove this key"
            yield Problem(f"{here}.{name}", "objects of other scripts cannot be reached", hint)
        if str(one.get("name")) in names:
            yield Problem(f"{here}.name", "is the name of another binding", "give it another name")
        names.add(str(one.get("name")))


def bindings_of(durable: object) -> list[Table]:
    """Return the bindings in `durable`, the value of the key `durable_objects`.

    Bindings that are not tables are left out, because the function `durable_objects` reports them.
    """
    found = durable.get("bindings") if isinstance(durable, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def migrations(value: object, path: str) -> Problems:
    """Check the value of the key `migrations`."""
    if not _are_tables(value) or not isinstance(value, list):
        yield Problem(path, "must be an array of tables", "write [[migrations]] or [{tag: …}]")
        return
    tags: set[str] = set()
    for index, one in enumerate(value):
        here = f"{path}.{index}"
        yield from unknown(one, MIGRATION[:-1], here) if "new_classes" not in one else ()
        yield from text(one.get("tag"), f"{here}.tag")
        if str(one.get("tag")) in tags:
            yield Problem(f"{here}.tag", "is the tag of another migration", "give it another name")
        tags.add(str(one.get("tag")))
        if "new_classes" in one:
            hint = "write new_sqlite_classes"
            yield Problem(f"{here}.new_classes", "these objects have no SQLite storage", hint)
        for name in ("new_sqlite_classes", "deleted_classes"):
            yield from texts(one.get(name, []), f"{here}.{name}")
        renamed = one.get("renamed_classes", [])
        if not _are_tables(renamed) or any(each.keys() != {"from", "to"} for each in renamed):
            yield Problem(f"{here}.renamed_classes", "must be {from, to} each", "write both names")


def classes_of(steps: object, exported: object) -> Iterator[str]:
    """Yield the classes that exist after all migrations, or those that `exports` declares.

    The migrations and exports must have been checked.
    """
    classes: set[str] = set(exported) if isinstance(exported, dict) else set()
    for step in steps if isinstance(steps, list) else []:
        classes |= set(step.get("new_sqlite_classes", []))
        for each in step.get("renamed_classes", []):
            classes = (classes - {each["from"]}) | {each["to"]}
        classes -= set(step.get("deleted_classes", []))
    yield from sorted(classes)


@table('write {Name = {type = "durable-object"}}')
def exports(value: Table, path: str) -> Problems:
    """Check the value of the key `exports`."""
    for name, one in value.items():
        if not isinstance(one, dict) or one.get("type") != "durable-object":
            yield Problem(
                f"{path}.{name}", "is not a durable object", 'write type = "durable-object"'
            )
        elif one.get("storage", "sqlite") != "sqlite":
            yield Problem(f"{path}.{name}.storage", "must be SQLite", 'write storage = "sqlite"')


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


CHECKS: dict[str, Check] = {
    "name": name_of,
    "main": text,
    "compatibility_date": compatibility_date,
    "compatibility_flags": texts,
    "vars": variables,
    "secrets": secrets,
    "route": route,
    "routes": routes,
    "triggers": triggers,
    "limits": limits,
    "observability": observability,
    "dev": dev,
    "durable_objects": durable_objects,
    "migrations": migrations,
    "exports": exports,
}
