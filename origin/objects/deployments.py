"""Deployments of the operator's classes by wrangler files, which configure Durable Objects.

Edges deploy wrangler files. The migrations in a wrangler file create, rename and delete classes of
objects; a renamed class keeps its objects. For each script an object of class `deployment` stores
in the ledger which migrations were carried out, so that each is carried out only once, even if
several edges and origins get the same file. The object's alarm rings when a cron is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog
from pydantic import BaseModel

from tailrace.ledger.errors import CallerError, Conflict, TailraceError
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.cron import next_after
from tailrace.ledger.objects.deployment import Deployment, Migration
from tailrace.ledger.objects.object import (
    ERASE,
    SCHEDULED,
    DurableObject,
    ObjectContext,
    ObjectRequest,
    ObjectResponse,
)
from tailrace.origin.objects.operator_classes import Classes

KEPT = "deployment"
"""Key under which a deployment object stores its state."""

CRON_LIMIT_S = 900.0
"""Maximum seconds that a cron's handler may take."""

ERASE_RETRY_MS = 60_000

NAMES_AT_ONCE = 1000

log = structlog.get_logger("objects")


class Deployed(BaseModel):
    """State of a deployment object.

    `tags` has the migrations that were carried out. `kinds` maps each class to the namespace of
    its objects in the ledger.
    """

    tags: list[str] = []
    kinds: dict[str, str] = {}
    erasing: list[str] = []
    """Namespaces of deleted classes whose objects are not all erased yet."""
    bound: list[str] = []
    due_ms: dict[str, int] = {}
    """Time in Unix ms at which each cron is next due."""

    def migrated(self, wanted: Deployment, own: Classes, now_ms: int) -> Deployed:
        """Return the state after the migrations of `wanted` that were not carried out before.

        Raises Conflict if a migration is impossible or has disappeared from the file.
        """
        after = self.model_copy(deep=True)
        told = {step.tag for step in wanted.migrations}
        if gone := [tag for tag in self.tags if tag not in told]:
            raise Conflict(
                f"migration {gone[0]} of {wanted.script} was carried out before, but is missing in"
                " the file",
                field="migrations",
                hint="add it again; to remove a class, add a migration with deleted_classes",
            )
        for step in wanted.migrations:
            if step.tag not in self.tags:
                after._step(wanted.script, step)
        _require(after.kinds, own, "migrations")
        after.bound = sorted(set(wanted.bindings.values()))
        for name in after.bound:
            if name not in after.kinds:
                raise Conflict(f"no migration makes the class {name}", field="durable_objects")
        if wanted.crons and not _scheduled(after.bound, own):
            raise Conflict(
                "no bound class has a method scheduled(), so there is nothing for crons to run",
                field="triggers.crons",
                hint="add scheduled() to a class, or remove the crons",
            )
        after.due_ms = {}
        for cron in wanted.crons:
            try:
                next_ms = next_after(cron, now_ms)
            except ValueError as error:
                raise CallerError(f"{cron!r} {error}", field="triggers.crons") from None
            if next_ms is not None:
                after.due_ms[cron] = min(next_ms, self.due_ms.get(cron, next_ms))
        return after

    def _step(self, script: str, step: Migration) -> None:
        for name in step.new_sqlite_classes:
            self.kinds.setdefault(name, f"{script}/{step.tag}/{name}")
        for each in step.renamed_classes:
            if each.before not in self.kinds or each.after in self.kinds:
                raise Conflict(
                    f"the class {each.before} cannot be renamed to {each.after}",
                    field=f"migrations: {step.tag}",
                    hint="existing classes: " + (", ".join(sorted(self.kinds)) or "none"),
                )
            self.kinds[each.after] = self.kinds.pop(each.before)
        for name in step.deleted_classes:
            if name not in self.kinds:
                raise Conflict(f"no class {name} to delete", field=f"migrations: {step.tag}")
            self.erasing.append(self.kinds.pop(name))
        self.tags.append(step.tag)

    def rings_at_ms(self, now_ms: int) -> int | None:
        """Return when the next cron is due or objects must be erased, in Unix ms; None if never."""
        return min((*self.due_ms.values(), *([now_ms] if self.erasing else [])), default=None)


def _require(names: Iterable[str], own: Classes, where: str) -> None:
    missing = sorted(set(names) - own.keys())
    if missing:
        raise Conflict(
            f"this origin has no class {missing[0]}",
            field=where,
            hint="its setting origin.objects must name the class; it names: "
            + (", ".join(sorted(own)) or "none"),
        )


def _scheduled(names: list[str], own: Classes) -> list[str]:
    """Return the classes that have a method `scheduled`, so that crons can run them."""
    return [name for name in names if own[name].scheduled is not DurableObject.scheduled]


class DeploymentObject(DurableObject):
    """Deployment of a wrangler file: its classes, their migrations, and crons."""

    def __init__(self, context: ObjectContext, own: Classes) -> None:
        super().__init__(context)
        self._own = own

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Deploy the wrangler file in the body of the PUT, and return the stored state."""
        wanted = Deployment.parse(request.body)
        before = await self._kept()
        now_ms = self.context.now_ms()
        after = before.migrated(wanted, self._own, now_ms)
        is_asleep = self.context.storage.get_alarm() is None
        if after != before or (is_asleep and after.rings_at_ms(now_ms) is not None):
            log.info("deployed", script=wanted.script, classes=sorted(after.kinds))
            self._keep(after)
        return ObjectResponse(200, body=after.model_dump_json().encode())

    async def alarm(self, retries: int) -> None:
        now_ms = self.context.now_ms()
        kept = await self._kept()
        for cron, at_ms in list(kept.due_ms.items()):
            if at_ms <= now_ms:
                await self._run(cron, at_ms, kept)
        left = [kind for kind in kept.erasing if not await self._erased(kind)]
        kept = await self._kept()  # read again, since another file may have been deployed meanwhile
        for cron, at_ms in list(kept.due_ms.items()):
            if at_ms <= now_ms:
                next_ms = next_after(cron, self.context.now_ms())
                assert next_ms is not None, "it has come before"
                kept.due_ms[cron] = next_ms
        kept.erasing = [kind for kind in kept.erasing if kind in left]
        self._keep(kept, ERASE_RETRY_MS)

    async def _run(self, cron: str, at_ms: int, kept: Deployed) -> None:
        """Run a cron: call `scheduled` in each class that has it, on the object named `cron`."""
        request = ObjectRequest.internal(SCHEDULED, str(at_ms).encode())
        script = self.context.key.name
        for name in _scheduled([one for one in kept.bound if one in self._own], self._own):
            try:
                async with asyncio.timeout(CRON_LIMIT_S):
                    await self.context.call(ObjectKey(kept.kinds[name], cron), request)
            except Exception as error:  # the operator's code may raise anything
                log.exception("cron failed", script=script, cron=cron, object=name, exc_info=error)
            else:
                log.info("cron", script=script, cron=cron, object=name, at_ms=at_ms)

    async def _erased(self, kind: str) -> bool:
        """Erase all objects in the namespace `kind`; return False if that failed."""
        request = ObjectRequest.internal(ERASE)
        try:
            while names := await self.context.ledger.objects.names(kind, limit=NAMES_AT_ONCE):
                for name in names:
                    await self.context.call(ObjectKey(kind, name), request)
        except TailraceError as error:
            log.warning("objects not erased", kind=kind, error=str(error))
            return False
        return True

    async def _kept(self) -> Deployed:
        raw = await self.context.storage.get(KEPT)
        return Deployed() if raw is None else Deployed.model_validate_json(raw)

    def _keep(self, deployed: Deployed, erase_in_ms: int = 0) -> None:
        self.context.storage.put(KEPT, deployed.model_dump_json().encode())
        at_ms = deployed.rings_at_ms(self.context.now_ms() + erase_in_ms)
        if at_ms is None:
            self.context.storage.delete_alarm()
        else:
            self.context.storage.set_alarm(at_ms)
