"""`tailrace key`: API keys of an edge, with their rights and limits."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.commands.options import ConfigOption, JsonOption, columns, command_group, tell
from tailrace.ledger.errors import CallerError, ConfigError, NotFound
from tailrace.ledger.links.rights import DEFAULT_TENANT

if TYPE_CHECKING:
    from tailrace.edge.access.keys import ApiKey, KeyFile
    from tailrace.ledger.frame import Priority

key_app = command_group("Manage API keys; running edges read changes at once.")

DEFAULT_RIGHTS = "generate,read,cancel,steer,stream-read,stream-write"
LONGEST_NAME = 64

KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="Key file. Default: the setting edge.api_keys."),
]


@key_app.command("add")
def key_add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Label of the key, shown in lists.")],
    tenant: Annotated[
        str, typer.Option(help="Tenant that owns the key and its streams.")
    ] = DEFAULT_TENANT,
    rights: Annotated[
        str,
        typer.Option(
            metavar="RIGHT,…",
            help="Rights of the key. `admin` gives all rights, for the streams of all tenants.",
        ),
    ] = DEFAULT_RIGHTS,
    expires_days: Annotated[
        float | None, typer.Option(min=0, help="Days until the key expires. Default: never.")
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Maximum requests per second of the tenant, at each edge.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Maximum concurrent requests of the tenant, at each edge.")
    ] = None,
    max_unfinished: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of running and waiting streams of the tenant, at each origin."
        ),
    ] = None,
    tokens_per_s: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per second of the tenant, prompts included, at each origin."
        ),
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(
            "--class",
            metavar="interactive|standard|batch",
            help="Most urgent class that the key's requests may have, and their default class."
            " Default: no bound.",
        ),
    ] = None,
    tokens_per_day: Annotated[
        int | None,
        typer.Option(help="Budget of this key: tokens per day of UTC, prompts included."),
    ] = None,
    tokens_per_month: Annotated[
        int | None,
        typer.Option(help="Budget of this key: tokens per month of UTC, prompts included."),
    ] = None,
    keys: KeysOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print it once; only its hash is stored.

    Limits apply to all keys of the tenant together. Limits that are not given stay unchanged. The
    budgets, tokens per day and month, are for this key alone.
    """
    from pydantic import ValidationError

    from tailrace.edge.access.keys import ApiKey, Limits, changing, digest_of, make_key
    from tailrace.ledger.links.rights import Right, check_tenant, parse_rights
    from tailrace.ledger.validation import invalid_document

    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise CallerError(
            "invalid name", field="NAME", hint=f"use 1 to {LONGEST_NAME} printable characters"
        )
    granted = parse_rights(part.strip() for part in rights.split(",") if part.strip())
    if Right.ADMIN in granted and tenant != DEFAULT_TENANT:
        raise CallerError(
            f"a key of tenant {tenant!r} cannot have the right `admin`, which opens the streams of"
            " all tenants",
            field="--rights",
            hint="leave out --tenant for an operator's key, or leave out `admin` for a tenant's",
        )
    id_, text = make_key(secrets.token_bytes)
    now = datetime.now(UTC)
    try:
        made = ApiKey(
            id=id_,
            name=name,
            tenant=check_tenant(tenant),
            rights=granted,
            sha256=digest_of(text),
            created=now,
            expires=None if expires_days is None else now + timedelta(days=expires_days),
            priority=None if priority is None else _class_of(priority),
            tokens_per_day=tokens_per_day,
            tokens_per_month=tokens_per_month,
        )
    except ValidationError as error:
        raise invalid_document(error) from None
    options = {limit: context.params[limit] for limit in Limits.model_fields}
    given = {limit: value for limit, value in options.items() if value is not None}
    path = _path(keys, config)
    with changing(path) as stored:
        before = stored.tenants.get(tenant, Limits())
        try:
            after = Limits.model_validate(before.model_dump() | given)
        except ValidationError as error:
            raise invalid_document(error) from None
        if given:
            stored.tenants[tenant] = after
        stored.keys.append(made)
    if as_json:
        typer.echo(json.dumps({"key": text} | _fields(made, now, stored)))
    else:
        typer.echo(text)
        typer.echo(f"stored as {id_} in {path}: save the key now, it is not shown again", err=True)


@key_app.command("list")
def key_list(
    keys: KeysOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """List all keys, including revoked ones, without their secrets."""
    from tailrace.edge.access.keys import read_keys

    stored, now = read_keys(_path(keys, config)), datetime.now(UTC)
    listed = [_fields(key, now, stored) for key in stored.keys]
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    heads = ("id", "name", "tenant", "state", "class", "rights", "limits and budgets")
    rows: list[tuple[str, ...]] = [heads]
    for each in listed:
        rights, limits, budgets = each["rights"], each["limits"], each["budgets"]
        assert isinstance(rights, list) and isinstance(limits, dict) and isinstance(budgets, dict)
        told = " ".join(f"{limit}={value:.15g}" for limit, value in (limits | budgets).items())
        words = (str(each[column] or "-") for column in rows[0][:5])
        rows.append((*words, ",".join(rights), told))
    typer.echo(columns(rows))


@key_app.command("revoke")
def key_revoke(
    key: Annotated[str, typer.Argument(metavar="ID|KEY", help="Id of the key, as in `key list`.")],
    keys: KeysOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key; its running streams continue."""
    from tailrace.edge.access.keys import PREFIX, changing, read_keys

    path, now = _path(keys, config), datetime.now(UTC)
    read_keys(path)  # raises if the file is missing; `changing` would create it
    id_ = key.removeprefix(PREFIX).partition("_")[0]
    with changing(path) as stored:
        found = next((each for each in stored.keys if each.id == id_), None)
        if found is None:
            hint = "tailrace key list shows all keys"
            raise NotFound(f"no key {id_}", code="unknown_key", hint=hint)
        found.revoked = found.revoked or now
    tell(_fields(found, now, stored), f"{id_} ({found.name}) is revoked", as_json=as_json)


def _class_of(word: str) -> Priority:
    from tailrace.ledger.frame import Priority

    try:
        return Priority.from_word(word)
    except CallerError as error:
        raise CallerError(
            f"{word!r} is not a priority class", field="--class", hint=f"use {error.hint}"
        ) from None


def _path(keys: Path | None, config: Path | None) -> Path:
    from tailrace.edge.config import EdgeConfig

    if keys is not None and config is not None:
        raise ConfigError("give --keys or --config, not both")
    return keys or EdgeConfig.load(config).api_keys


def _fields(key: ApiKey, now: datetime, stored: KeyFile) -> dict[str, object]:
    limits = stored.tenants.get(key.tenant)
    budgets = {"tokens_per_day": key.tokens_per_day, "tokens_per_month": key.tokens_per_month}
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "state": key.state(now),
        "class": None if key.priority is None else key.priority.word,
        "rights": list(key.rights.words),
        "limits": {} if limits is None else limits.model_dump(exclude_none=True),
        "budgets": {name: tokens for name, tokens in budgets.items() if tokens is not None},
        "created": key.created.isoformat(),
        "expires": None if key.expires is None else key.expires.isoformat(),
        "revoked": None if key.revoked is None else key.revoked.isoformat(),
    }
