"""The rotary embedding of a config.json, in the old spelling and in the new.

Older files have `rope_theta` at the top and a `rope_scaling` with `type` or `rope_type`; newer
ones have all of it in `rope_parameters`. Where both are there, transformers goes by
`rope_scaling`, and so does this.
"""

from __future__ import annotations

from kernels.attention.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from origin.checkpoint.config_keys import ROPE
from origin.checkpoint.model_json import JsonObject, shown

KINDS = "default, linear, dynamic, llama3 or yarn"


def read_rope(
    config: JsonObject, context: int, default_theta: float
) -> tuple[float, RopeScaling | None]:
    """(theta, how it is scaled) of a config.json whose context is already known."""
    old, new = config.child("rope_scaling"), config.child("rope_parameters")
    rope = old if old is not None and old.raw else new
    if rope is None:
        rope = JsonObject(config.file, {}, config.findings)
    rope.nothing_but(ROPE)
    theta = config.number("rope_theta", default_theta, above=1.0)
    theta = rope.number("rope_theta", theta, above=1.0)
    for part in (config, rope):
        part.only("partial_rotary_factor", 1.0, default=1.0)
    try:
        return theta, _scaling(config, rope, context)
    except ValueError as exc:  # each number is right, but not beside the others
        rope.fault("", str(exc))
        return theta, None


def _scaling(config: JsonObject, rope: JsonObject, context: int) -> RopeScaling | None:
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    match kind:
        case "default":
            return None
        case "dynamic":
            # It stretches only what is longer than the context, and nothing longer is served.
            rope.number("factor")
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_turns=rope.number("low_freq_factor"),
                high_turns=rope.number("high_freq_factor"),
                original_context=_original_context(config, rope, context),
            )
        case "yarn":
            return _yarn(config, rope, context)
    key = "rope_type" if rope.raw.get("rope_type") else "type"
    rope.fault(key, shown(kind), KINDS)
    return None


def _yarn(config: JsonObject, rope: JsonObject, context: int) -> YarnScaling:
    original = _original_context(config, rope, context)
    factor = rope.number("factor", context / original)
    factors = (rope.optional_number("mscale"), rope.optional_number("mscale_all_dim"))
    scaling = YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor", yarn_attention_factor(factor, *factors)),
        fast_turns=rope.number("beta_fast", 32.0),
        slow_turns=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
    )
    if original * factor > context:
        config.note(
            "max_position_embeddings",
            f"{context}: the scaling reaches to {original * factor:.0f} tokens",
            "a larger number serves longer contexts",
        )
    return scaling


def _original_context(config: JsonObject, rope: JsonObject, context: int) -> int:
    """The context of the training; a number at the top of the file goes first."""
    key = "original_max_position_embeddings"
    return config.count(key, rope.count(key, context))
