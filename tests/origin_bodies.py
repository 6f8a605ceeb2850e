"""The schemas of bodies that origins read, for `/openapi.json`: `python -m tests.origin_bodies`.

An edge does not import an origin, so that what they describe is a file of the edge's.
"""

from __future__ import annotations

import json

from pydantic import BaseModel

from tailrace.edge.openapi.schemas import ORIGIN_BODIES, Schemas, plain
from tailrace.origin.admin.simulation import SimulationRequest
from tailrace.origin.admin.warm import WantedModel, WantedPin, WantedPolicy
from tailrace.origin.subscriptions.request import ClaimBody, CreateBody, HolderBody, StreamsBody

MODELS: dict[str, tuple[type[BaseModel], str]] = {
    "SimulationRequest": (
        SimulationRequest,
        "Policies to run over a trace: a generated one by its name, `history`, or `csv` with lines"
        " of model,arrival_s,duration_s. `days` is the length of the trace.",
    ),
    "PolicyRequest": (WantedPolicy, "A policy to apply, or to run as a shadow."),
    "PrewarmRequest": (WantedModel, "A model to load now."),
    "PinRequest": (WantedPin, "A model to keep loaded, or to let go."),
    "SubscriptionRequest": (
        CreateBody,
        "A subscription: `pattern` or `streams`, and `webhook` or `wake_stream`.",
    ),
    "SubscribedStreams": (StreamsBody, "Streams to add to a subscription."),
    "ClaimRequest": (ClaimBody, "The worker that claims a wake."),
    "HolderRequest": (HolderBody, "What the holder of a wake has done."),
}


def origin_bodies() -> Schemas:
    """Return the schemas by their names in the document."""
    made: Schemas = {}
    for name, (model, description) in MODELS.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        made |= {inner: plain(one) for inner, one in schema.pop("$defs", {}).items()}
        made[name] = plain(schema) | {"description": description}
    return {name: made[name] for name in sorted(made)}


def text() -> str:
    """Return the file's content."""
    return json.dumps(origin_bodies(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    ORIGIN_BODIES.write_text(text(), encoding="utf-8")
