"""Reads the settings of an edge from a `wrangler.toml` or `wrangler.jsonc`, and explains its keys.

This module opens no file: callers pass the text of the file, and the names of the process's
environment variables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import NamedTuple

from dotenv.parser import parse_stream
from pydantic import SecretStr

from tailrace.edge.config import EdgeConfig
from tailrace.edge.wrangler import jsonc
from tailrace.edge.wrangler.checks import (
    CHECKS,
    Problem,
    Table,
    bindings_of,
    classes_of,
    host_and_path,
    unknown,
)
from tailrace.edge.wrangler.keys import BUILT_IN, KEYS, Effect
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.objects.deployment import Deployment
from tailrace.ledger.validation import closest_name

PREFIX = "TAILRACE_EDGE_"
"""Prefix of variables and secrets that are settings of the edge, as in a process's environment."""
NEW, DELETED = "new_sqlite_classes", "deleted_classes"
REQUIRED = ("name", "main", "compatibility_date")
DEV_PORT = 8787
"""The port on which `wrangler dev` listens by default."""


class Finding(NamedTuple):
    """The effect of a key of the file, or what is wrong with the key.

    The key's value is not included, because it may be a secret.

    Attributes:
        key: The path of the key; it begins with `env.NAME.` in an environment.
        environment: The environment that has the key, or None for the top level.
        effect: What the key does.
        why: The reason for the effect, or what is wrong.
        hint: How to correct the key, if it is wrong.
    """

    key: str
    environment: str | None
    effect: Effect
    why: str
    hint: str | None = None


class Source(NamedTuple):
    """The value of a setting and the key that sets it. The value of a secret must not be shown."""

    value: object
    key: str
    secret: bool = False


class DevVars(NamedTuple):
    """The name and text of a file of secrets: `.dev.vars`, or `.dev.vars.NAME` of an environment.

    As in wrangler, the file of the chosen environment replaces `.dev.vars`.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a file for one environment; without settings if a key is refused."""

    file: str
    findings: list[Finding]
    settings: Mapping[str, Source]
    deployment: Deployment | None = None
    """The classes, bindings and crons for the origins, if there are any."""

    @property
    def refused(self) -> list[Finding]:
        """The findings about refused keys, because of which the edge does not start."""
        return [one for one in self.findings if one.effect is Effect.REFUSED]

    def check(self) -> None:
        """Raise ConfigError if keys are refused: it names the first key and counts the others."""
        if not self.refused:
            return
        first, *others = self.refused
        more = f"; and {len(others)} more, which config check --wrangler lists" if others else ""
        raise ConfigError(first.why, field=f"{self.file}: {first.key}", hint=f"{first.hint}{more}")


def read(
    text: str,
    file: str,
    *,
    environment: str | None = None,
    dev_vars: DevVars | None = None,
    outside: Collection[str] = (),
) -> Reading:
    """Read the text of a wrangler file.

    Args:
        text: The text of the file.
        file: The name of the file. It is TOML if it ends in `.toml`, otherwise JSON with comments.
        environment: The chosen environment, or None for the top level.
        dev_vars: The file of secrets in the same folder, if there is one.
        outside: Names of the process's environment variables. They override the file, and a secret
            that the file requires may be one of them.

    Raises:
        ConfigError: The text is neither TOML nor JSON with comments.
    """
    top = _parsed(text, file)
    named = top.get("env", {})
    tables = named if isinstance(named, dict) else {}
    environments = {name: table for name, table in tables.items() if isinstance(table, dict)}
    found = [_finding(one, None) for one in _problems(top, None)]
    for name, table in environments.items():
        found += [_finding(one, name) for one in _problems(table, top)]
    if not isinstance(named, dict) or len(environments) < len(named):
        hint = "write [env.staging] or {staging: {…}}"
        found.append(_finding(Problem("env", "must be a table of tables", hint), None))
    elif environment is not None and environment not in environments:
        known = ", ".join(environments) or "none"
        message = f"there is no environment {environment!r}"
        found.append(_finding(Problem("env", message, f"there are: {known}"), None))
    if not found:
        found = [
            _finding(one, name)
            for name in (None, *environments)
            for one in _whole(_Scope(top, name, environments), is_chosen=name == environment)
        ]
    if found:
        return Reading(file, found, {})
    scope = _Scope(top, environment, environments)
    try:
        secret = _secrets(scope, dev_vars, outside)
        settings = _settings(scope, secret)
    except _Wrong as wrong:
        return Reading(file, [_finding(wrong.problem, None)], {})
    by_key = {source.key: setting for setting, source in settings.items()}
    findings = list(_Explanation(scope, by_key, outside).findings(secret))
    return Reading(file, findings, settings, _deployment(scope))


class _Wrong(Exception):
    """Raised for a problem after which the file is not read any further."""

    def __init__(self, path: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.problem = Problem(path, message, hint)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The keys that apply in the environment `name`; if `name` is None, those of the top level."""

    top: Table
    name: str | None
    environments: Mapping[str, Table]

    @property
    def script(self) -> str:
        """The script's name.

        As in wrangler, an environment without the key `name` appends its own name to the top
        level's, such as `api-staging`.
        """
        if self.name is None or "name" in self.own:
            return str(self.own["name"])
        return f"{self.top['name']}-{self.name}"

    @property
    def own(self) -> Table:
        """The keys that the environment itself has, without inherited ones."""
        return self.top if self.name is None else self.environments[self.name]

    def place(self, key: str) -> str | None:
        """Return the path of a key, which may be inherited; None if no such key applies."""
        if key in self.own:
            return key if self.name is None else f"env.{self.name}.{key}"
        pair = {"route": "routes", "routes": "route"}.get(key)
        inherited = key in KEYS and KEYS[key].inherited and not (pair and pair in self.own)
        return key if inherited and key in self.top else None

    def value(self, key: str) -> object:
        """Return the value of a key, which may be inherited; None if no such key applies."""
        if self.place(key) is None:
            return None
        return self.own.get(key, self.top.get(key))


def _parsed(text: str, file: str) -> Table:
    """Parse TOML or JSON with comments. Raises ConfigError if the text is not valid."""
    try:
        document = tomllib.loads(text) if file.endswith(".toml") else jsonc.parse(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: {error}", hint="give a wrangler.toml, a wrangler.jsonc or a wrangler.json"
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: must be an object", hint="write { … }")
    return document


def _finding(problem: Problem, environment: str | None) -> Finding:
    """Return a problem as the finding of a refused key."""
    path = problem.path if environment is None else f"env.{environment}.{problem.path}"
    return Finding(path, environment, Effect.REFUSED, problem.message, problem.hint)


def _problems(table: Table, top: Table | None) -> Iterator[Problem]:
    """Yield the problems of single keys of `table`.

    `top` is None if this is the top level; for an environment it is the top level's table.
    """
    yield from unknown(table, KEYS)
    for name in (name for name in table if name in KEYS):
        key = KEYS[name]
        if key.effect is Effect.REFUSED:
            yield Problem(name, "has no meaning on a Tailrace edge", key.why)
        elif top is not None and key.top_only:
            yield Problem(name, "belongs at the top level", "move it there")
        elif name in CHECKS:
            yield from CHECKS[name](table[name], name)
    if "route" in table and "routes" in table:
        yield Problem("route", "routes is given, too", "write all routes there")
    for name, key in KEYS.items():
        lost = top is not None and name in top and name not in table and not key.inherited
        if lost and key.effect is not Effect.REFUSED:
            hint = f"write {name} here too; leave it empty if there is none"
            yield Problem(name, "is at the top level, and is not inherited", hint)


def _whole(scope: _Scope, *, is_chosen: bool) -> Iterator[Problem]:
    """Yield problems between several keys that apply in an environment, and missing keys."""
    for name in REQUIRED if is_chosen else ():
        if scope.place(name) is None:
            yield Problem(name, "is missing", "wrangler requires it, and so does an edge")
    if scope.place("migrations") and scope.place("exports"):
        yield Problem("exports", "migrations are given, too", "declare classes in one of them")
    objects = scope.own.get("durable_objects")
    classes = list(classes_of(scope.value("migrations"), scope.value("exports")))
    names = scope.own.get("vars", {})
    for index, binding in enumerate(bindings_of(objects)):
        here = f"durable_objects.bindings.{index}"
        if binding["class_name"] not in classes:
            hint = "add it to new_sqlite_classes of a migration; there are: "
            hint += ", ".join(classes) or "none"
            message = f"no migration makes the class {binding['class_name']}"
            yield Problem(f"{here}.class_name", message, hint)
        if isinstance(names, dict) and binding["name"] in names:
            yield Problem(
                f"{here}.name", "is the name of a variable", "give one of them another name"
            )
    bound = {binding["class_name"] for binding in bindings_of(objects)}
    if is_chosen and _crons(scope) and bound <= BUILT_IN.keys():
        hint = "bind a class of the origin that has scheduled(), or remove the crons"
        yield Problem("triggers.crons", "there is nothing to run at these times", hint)


def _deployment(scope: _Scope) -> Deployment | None:
    """Return the deployment for the origins; None if all classes of the file are in `BUILT_IN`."""
    exported = scope.value("exports")
    steps = scope.value("migrations")
    made = [{"tag": f"exports {name}", NEW: [name]} for name in classes_of(None, exported)]
    migrations = [_of_the_origin(one) for one in (steps if isinstance(steps, list) else made)]
    bindings = {
        str(one["name"]): str(one["class_name"])
        for one in bindings_of(scope.own.get("durable_objects"))
        if one["class_name"] not in BUILT_IN
    }
    crons = _crons(scope)
    if not bindings and not crons and not list(classes_of(migrations, None)):
        return None
    return Deployment.model_validate(
        {"script": scope.script, "bindings": bindings, "migrations": migrations, "crons": crons}
    )


def _of_the_origin(step: Table) -> Table:
    """Return a migration without the classes in `BUILT_IN`, which origins neither have nor need."""
    kept = dict(step)
    for key in (NEW, DELETED):
        names = step.get(key, [])
        assert isinstance(names, list), "it was checked"
        kept[key] = [name for name in names if name not in BUILT_IN]
    return kept


def _crons(scope: _Scope) -> list[str]:
    """Return the cron expressions without duplicates."""
    triggers = scope.value("triggers")
    crons = triggers.get("crons", []) if isinstance(triggers, dict) else []
    return list(dict.fromkeys(crons))


def _secrets(
    scope: _Scope, dev_vars: DevVars | None, outside: Collection[str]
) -> dict[str, Source]:
    """Return the secrets of `.dev.vars` by name.

    Raises _Wrong if a line is not valid or a required secret is missing. The error shows no value.
    """
    found: dict[str, Source] = {}
    if dev_vars is not None:
        for line in parse_stream(StringIO(dev_vars.text)):
            place = f"{dev_vars.name}, line {line.original.line}"
            if line.error or (line.key is not None and line.value is None):
                raise _Wrong(place, "is not NAME=VALUE", "quote what has spaces or #")
            if line.key is not None:
                found[line.key] = Source(line.value, f"{dev_vars.name}: {line.key}", secret=True)
    table = scope.value("secrets")
    required = table.get("required", []) if isinstance(table, dict) else None
    if required is None:
        return found
    for name in required:
        if name not in found and name not in outside:
            hint = "set it in .dev.vars beside the file, or in the environment"
            raise _Wrong(f"{scope.place('secrets')}.required", f"{name} is not set", hint)
    for name in (name for name in found if name not in required):
        hint = "wrangler would ignore it; add it there"
        raise _Wrong(found[name].key, "is not in secrets.required", hint)
    return found


def _settings(scope: _Scope, secrets: Mapping[str, Source]) -> dict[str, Source]:
    """Return the settings by name; variables override `dev` and routes, secrets override both."""
    found: dict[str, Source] = {}
    if isinstance(dev := scope.value("dev"), dict) and {"ip", "port", "local_protocol"} & set(dev):
        found |= _listening(dev)
    for key in ("route", "routes"):
        if (place := scope.place(key)) is not None:
            value = scope.value(key)
            listed = value if isinstance(value, list) else [value]
            patterns = [one["pattern"] if isinstance(one, dict) else one for one in listed]
            hosts = dict.fromkeys(host_and_path(str(pattern))[0] for pattern in patterns)
            found["hosts"] = Source(list(hosts), place)
    variables = scope.value("vars")
    place = scope.place("vars")
    said = {
        name: Source(value, f"{place}.{name}")
        for name, value in (variables.items() if isinstance(variables, dict) else ())
    }
    for name, source in (*said.items(), *secrets.items()):
        if name.startswith(PREFIX) and (setting := _setting(name, source)) is not None:
            found[setting] = source
    return found


def _listening(dev: Table) -> dict[str, Source]:
    """Return the settings `http` and `https` for the address in the key `dev`."""
    host = str(dev.get("ip", "localhost")).replace("*", "0.0.0.0")
    host = f"[{host}]" if ":" in host else host
    address = [f"{host}:{dev.get('port', DEV_PORT)}"]
    if dev.get("local_protocol") == "https":
        return {"https": Source(address, "dev"), "http": Source([], "dev.local_protocol")}
    return {"http": Source(address, "dev")}


def _setting(name: str, source: Source) -> str | None:
    """Return the setting that a variable sets, or None if the setting is retired.

    Raises _Wrong for an unknown setting, and for a secret in `vars`: that file is often in a
    repository.
    """
    setting = name.removeprefix(PREFIX).lower()
    if setting in EdgeConfig.retired:
        return None
    if name != name.upper() or setting not in EdgeConfig.model_fields:
        known = [f"{PREFIX}{one}".upper() for one in EdgeConfig.model_fields]
        closest = closest_name(name, known)
        hint = f"did you mean {closest}?" if closest else "tailrace config init lists settings"
        raise _Wrong(source.key, "is not a setting of an edge", hint)
    is_secret = EdgeConfig.model_fields[setting].annotation == SecretStr | None
    if is_secret and not source.secret:
        raise _Wrong(source.key, "is a secret", "set it in .dev.vars or in the environment")
    return setting


@dataclass(frozen=True, slots=True)
class _Explanation:
    """Explains the effect of each key; `by_key` maps a key to the setting that it sets."""

    scope: _Scope
    by_key: Mapping[str, str]
    outside: Collection[str]

    def findings(self, secrets: Mapping[str, Source]) -> Iterator[Finding]:
        """Yield a finding for each key of the top level, the environment and `.dev.vars`."""
        scope = self.scope
        for name, value in scope.top.items():
            if name == "env":
                for each in scope.environments:
                    chosen = each == scope.name
                    effect = Effect.HONOURED if chosen else Effect.IGNORED
                    yield Finding(f"env.{each}", each, effect, "chosen" if chosen else "not chosen")
            elif scope.place(name) != name:
                own = f"env.{scope.name} has its own"
                yield Finding(name, None, Effect.IGNORED, own)
            else:
                yield from self._of_key(name, name, None, value)
        if scope.name is not None:
            for name, value in scope.own.items():
                yield from self._of_key(name, f"env.{scope.name}.{name}", scope.name, value)
        for name, source in secrets.items():
            yield self._of_variable(name, source.key, scope.name)

    def _of_key(
        self, name: str, path: str, environment: str | None, value: object
    ) -> Iterator[Finding]:
        if name == "vars" and isinstance(value, dict):
            for each in value:
                yield self._of_variable(each, f"{path}.{each}", environment)
        elif name == "dev" and isinstance(value, dict):
            for each in value:
                if each in ("ip", "port", "local_protocol"):
                    yield self._of_setting(f"dev.{each}", None, "dev", "HTTP")
                else:
                    why = "wrangler's own server reads it"
                    yield Finding(f"dev.{each}", None, Effect.IGNORED, why)
        elif name in ("route", "routes"):
            yield self._of_setting(path, environment, path, "HOSTS")
        else:
            yield Finding(path, environment, KEYS[name].effect, KEYS[name].why)

    def _of_variable(self, name: str, path: str, environment: str | None) -> Finding:
        if not name.startswith(PREFIX):
            why = f"a script would read it; settings of this edge begin with {PREFIX}"
            return Finding(path, environment, Effect.IGNORED, why)
        word = name.removeprefix(PREFIX)
        if (reason := EdgeConfig.retired.get(word.lower())) is not None:
            why = f"edge.{word.lower()} has no effect any more: {reason}"
            return Finding(path, environment, Effect.IGNORED, why)
        return self._of_setting(path, environment, path, word)

    def _of_setting(self, path: str, environment: str | None, key: str, word: str) -> Finding:
        """Explain a key that sets a setting: it is ignored if another key overrides it."""
        setting = self.by_key.get(key)
        variable = f"{PREFIX}{setting or word}".upper()
        if variable in self.outside:
            why = f"{variable} of the environment overrides it"
        elif setting is None:
            why = f"{variable} in vars or .dev.vars overrides it"
        else:
            return Finding(path, environment, Effect.HONOURED, f"edge.{setting}")
        return Finding(path, environment, Effect.IGNORED, why)
