"""Every key of a wrangler file, and what it does on an edge of ours."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Effect(StrEnum):
    """What comes of a key: something, nothing, or an error."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


class Key(NamedTuple):
    """`why` it has that effect; of one that is refused, what would be right."""

    effect: Effect
    why: str
    inherited: bool
    """Whether an environment without it has that of the top level."""
    top_only: bool


_NO_SCRIPT = "an edge of ours runs no script"
BUILT_IN = {
    "StreamObject": "its streams are in the origin's ledger: /v1/generate",
    "SessionObject": "its sessions are this edge's own: /v1/ws",
}
"""Classes of the Worker in wrangler-compat/, whose work an edge does itself. Files for
an older Worker name `SessionObject`, too."""
_NO_BINDING = "an edge of ours has nothing to bind it to; take it out, or deploy this to Workers"

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
        "env": "each has what --env NAME chooses",
        "route": "gives edge.hosts the names that requests may ask for",
        "routes": "gives edge.hosts the names that requests may ask for",
        "vars": "those of the name TAILRACE_EDGE_… are settings of this edge",
        "secrets": "the edge does not start without those that are required",
        "dev": "ip, port and local_protocol say where this edge listens",
        "durable_objects": "/v1/objects/BINDING/NAME is an object of the origin's",
        "migrations": "origins are told, and carry out what is new",
        "exports": "origins are told which classes there are",
        "triggers": "origins call scheduled() of bound classes at these times",
    },
    Effect.IGNORED: {
        "name": "nothing on this edge goes by a name",
        "limits": f"{_NO_SCRIPT}; the limits of this edge are its settings",
        "observability": "logs go to stderr, all of them; TAILRACE_EDGE_LOG_LEVEL in vars says"
        " from which level",
        "containers": "this edge starts none; TAILRACE_EDGE_ORIGIN in vars says where origins are",
        "$schema": "an editor reads it",
        "send_metrics": "wrangler reads it",
        "keep_vars": "wrangler reads it",
        **dict.fromkeys(_OF_SCRIPTS.split(), _NO_SCRIPT),
        **dict.fromkeys(_OF_CLOUDFLARE.split(), "it is about Cloudflare's network or account"),
    },
    Effect.REFUSED: {
        "first_party_worker": "it is Cloudflare's own; take it out",
        "python_modules": "wrangler-compat/ is a Worker in TypeScript; take it out",
        "site": "an edge of ours serves no files; take it out",
        "pages_build_output_dir": "an edge of ours serves no Pages; take it out",
        "legacy_env": "service environments are gone; take it out",
        **dict.fromkeys(
            ("wasm_modules", "text_blobs", "data_blobs"), "of old scripts; take it out"
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
