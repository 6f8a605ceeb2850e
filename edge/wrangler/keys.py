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
    inherited: bool = True
    """Whether an environment without it has that of the top level."""
    top_only: bool = False


_NO_SCRIPT = "an edge of ours runs no script"
_CLOUDFLARE = "it is about Cloudflare's network or account"
BUILT_IN = {
    "StreamObject": "its streams are in the origin's ledger: /v1/generate",
    "SessionObject": "its sessions are this edge's own: /v1/ws",
}
"""Classes of wrangler-compat/, which an edge of ours has in its own way."""
_NO_BINDING = "an edge of ours has nothing to bind it to; take it out, or deploy this to Workers"

_SHORT = {
    Effect.HONOURED: {
        "env": ("each has what --env NAME chooses", True, True),
        "route": ("gives edge.hosts the names that requests may ask for", True, False),
        "routes": ("gives edge.hosts the names that requests may ask for", True, False),
        "vars": ("those of the name TAILRACE_EDGE_… are settings of this edge", False, False),
        "secrets": ("the edge does not start without those that are required", False, False),
        "dev": ("ip, port and local_protocol say where this edge listens", True, True),
        "durable_objects": ("/v1/objects/BINDING/NAME is an object of the origin's", False, False),
        "migrations": (
            "origins are told, and carry out what is new",
            True,
            False,
        ),
        "exports": ("origins are told which classes there are", True, False),
        "triggers": ("origins call scheduled() of bound classes at these times", True, False),
    },
    Effect.IGNORED: {
        "name": ("nothing on this edge goes by a name", True, False),
        "main": (_NO_SCRIPT, True, False),
        "compatibility_date": (_NO_SCRIPT, True, False),
        "compatibility_flags": (_NO_SCRIPT, True, False),
        "limits": (f"{_NO_SCRIPT}; the limits of this edge are its settings", True, False),
        "observability": (
            "logs go to stderr, all of them; TAILRACE_EDGE_LOG_LEVEL in vars says from which level",
            True,
            False,
        ),
        "containers": (
            "this edge starts none; TAILRACE_EDGE_ORIGIN in vars says where origins are",
            False,
            False,
        ),
        "define": (_NO_SCRIPT, False, False),
    },
}
_IGNORED_BUILD = (
    "base_dir build find_additional_modules jsx_factory jsx_fragment keep_names minify no_bundle"
    " preserve_file_names rules tsconfig upload_source_maps"
)
_IGNORED_CLOUDFLARE = (
    "account_id compliance_region logpush placement preview_urls previews workers_dev"
)
_IGNORED_TOP = {"$schema": "an editor reads it", "send_metrics": "wrangler reads it"}
_IGNORED_TOP |= {"keep_vars": "wrangler reads it", "alias": _NO_SCRIPT}
_REFUSED_BINDINGS = (
    "ai ai_search ai_search_namespaces analytics_engine_datasets artifacts assets browser"
    " cloudchamber d1_databases dispatch_namespaces flagship hyperdrive images kv_namespaces"
    " logfwdr media mtls_certificates pipelines queues r2_buckets ratelimits"
    " secrets_store_secrets send_email services stream streaming_tail_consumers tail_consumers"
    " unsafe unsafe_hello_world vectorize version_metadata vpc_networks vpc_services"
    " worker_loaders workflows"
)
_REFUSED = {
    "first_party_worker": "it is Cloudflare's own; take it out",
    "python_modules": "wrangler-compat/ is a Worker in TypeScript; take it out",
    "site": "an edge of ours serves no files; take it out",
    "pages_build_output_dir": "an edge of ours serves no Pages; take it out",
    "legacy_env": "service environments are gone; take it out",
    **dict.fromkeys(("wasm_modules", "text_blobs", "data_blobs"), "of old scripts; take it out"),
}

KEYS: dict[str, Key] = {
    **{name: Key(effect, *rest) for effect, keys in _SHORT.items() for name, rest in keys.items()},
    **{name: Key(Effect.IGNORED, _NO_SCRIPT) for name in _IGNORED_BUILD.split()},
    **{name: Key(Effect.IGNORED, _CLOUDFLARE) for name in _IGNORED_CLOUDFLARE.split()},
    **{name: Key(Effect.IGNORED, why, top_only=True) for name, why in _IGNORED_TOP.items()},
    **{name: Key(Effect.REFUSED, _NO_BINDING) for name in _REFUSED_BINDINGS.split()},
    **{name: Key(Effect.REFUSED, why) for name, why in _REFUSED.items()},
}
