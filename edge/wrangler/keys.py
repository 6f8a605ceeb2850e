"""Every key of a wrangler file, and its effect on a Tailrace edge."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Effect(StrEnum):
    """The effect of a key: it is honoured, ignored, or refused as an error."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


class Key(NamedTuple):
    """A key of the file.

    Attributes:
        effect: What the key does.
        why: The reason for the effect; for a refused key also what to do.
        inherited: True if an environment that lacks the key inherits it from the top level.
        top_only: True if the key is allowed at the top level only.
    """

    effect: Effect
    why: str
    inherited: bool
    top_only: bool


_NO_SCRIPT = "a Tailrace edge runs no script"
BUILT_IN = {
    "StreamObject": "its streams are in the origin's ledger: /v1/generate",
    "SessionObject": "an edge has the sessions itself: /v1/ws",
}
"""Durable Object classes of the Worker in wrangler-compat/, and why an edge does not need them.
Files for older versions of this Worker also name `SessionObject`."""
_NO_BINDING = "a Tailrace edge has nothing to bind it to; remove it, or deploy this file to Workers"

_OF_SCRIPTS = (
    "alias base_dir build compatibility_date compatibility_flags define find_additional_modules"
    " jsx_factory jsx_fragment keep_names main minify no_bundle preserve_file_names rules tsconfig"
    " upload_source_maps"
)
_OF_CLOUDFLARE = "account_id compliance_region logpush placement preview_urls previews workers_dev"
_BINDINGS = (
    "ai ai_search ai_search_namespaces analytics_engine_datasets artifacts assets browser"
    " cloudchamber d1_databases dispatch_namespaces flagship hyperdrive images kv_namespaces"
    " logfwdr media mtls_certificates pipelines queues r2_buckets ratelimits"
    " secrets_store_secrets send_email services stream streaming_tail_consumers tail_consumers"
    " unsafe unsafe_hello_world vectorize version_metadata vpc_networks vpc_services"
    " worker_loaders workflows"
)
_WHY = {
    Effect.HONOURED: {
        "env": "--env NAME chooses one of them",
        "route": "sets edge.hosts, the host names that requests may use",
        "routes": "sets edge.hosts, the host names that requests may use",
        "vars": "variables named TAILRACE_EDGE_… are settings of this edge",
        "secrets": "the edge does not start without the required ones",
        "dev": "ip, port and local_protocol set where this edge listens",
        "durable_objects": "/v1/objects/BINDING/NAME is an object of the origin",
        "migrations": "origins receive them and carry out the new ones",
        "exports": "origins receive the names of the classes",
        "triggers": "origins call scheduled() of bound classes at these times",
    },
    Effect.IGNORED: {
        "name": "this edge has no use for a name",
        "limits": f"{_NO_SCRIPT}; the limits of this edge are its settings",
        "observability": "logs go to stderr, all of them; TAILRACE_EDGE_LOG_LEVEL in vars"
        " sets the level",
        "containers": "this edge starts none; TAILRACE_EDGE_ORIGIN in vars sets the origins",
        "$schema": "only editors read it",
        "send_metrics": "only wrangler reads it",
        "keep_vars": "only wrangler reads it",
        **dict.fromkeys(_OF_SCRIPTS.split(), _NO_SCRIPT),
        **dict.fromkeys(_OF_CLOUDFLARE.split(), "it is about Cloudflare's network or account"),
    },
    Effect.REFUSED: {
        "first_party_worker": "it is Cloudflare's own; remove it",
        "python_modules": "wrangler-compat/ is a Worker in TypeScript; remove it",
        "site": "a Tailrace edge serves no files; remove it",
        "pages_build_output_dir": "a Tailrace edge serves no Pages; remove it",
        "legacy_env": "wrangler has no service environments any more; remove it",
        **dict.fromkeys(
            ("wasm_modules", "text_blobs", "data_blobs"), "only old scripts have it; remove it"
        ),
        **dict.fromkeys(_BINDINGS.split(), _NO_BINDING),
    },
}
_NOT_INHERITED = ("vars", "secrets", "durable_objects", "containers", "define")
_TOP_ONLY = ("env", "dev", "$schema", "send_metrics", "keep_vars", "alias")

KEYS = {
    name: Key(effect, why, name not in _NOT_INHERITED, name in _TOP_ONLY)
    for effect, keys in _WHY.items()
    for name, why in keys.items()
}
