"""What architectures share: norms, rotary tables, and how a config.json is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arch import Weight
from ..errors import SizingError
from ..reader import Keys

# Weights


def norms(prefix: str, hidden: int, count: int) -> Weight:
    """``count`` norms over the model's width."""
    return Weight(f"{prefix}.norms", hidden * count)


def rotary(positions: int, width: int, element: float | None = None) -> Weight:
    """cos and sin of every position: rotary_embedding/base.py: cos_sin_cache."""
    return Weight("rotary", positions, width, element=element)


# Readings


def max_len(c: Keys) -> int:
    """Positions a model was made for."""
    return c.number("max_position_embeddings", "seq_length", "n_positions", "max_seq_len")


def tied(c: Keys, top: Keys, default: bool = False) -> bool:
    """Whether the head is the embedding."""
    if c.data.get("tie_word_embeddings") is not None:
        return c.flag("tie_word_embeddings")
    return top.flag("tie_word_embeddings", default=default)


def rotary_positions(c: Keys) -> int:
    """Rows of the rotary table: YaRN's covers factor x original positions."""
    scaling = c.get("rope_scaling", "rope_parameters")
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type", scaling.get("type"))
        original = scaling.get("original_max_position_embeddings")
        factor = scaling.get("factor")
        if (
            kind in ("yarn", "deepseek_yarn")
            and isinstance(original, int)
            and isinstance(factor, int | float)
        ):
            return int(original * c.share("factor", factor))
    return max_len(c)


def rotary_width(c: Keys, head: int, default: float = 1.0) -> int:
    """Rotated part of a head."""
    scaling = c.get("rope_parameters")
    inner = scaling.get("partial_rotary_factor") if isinstance(scaling, Mapping) else None
    factor = inner if inner is not None else c.get("partial_rotary_factor", default=default)
    return int(head * c.share("partial_rotary_factor", factor))


def layer_types(c: Keys, count: int) -> list[str] | None:
    """The kind of each layer, where the config lists them."""
    types = c.names("layer_types")
    if types is not None and len(types) < count:
        raise SizingError(f"{c.where}: layer_types has {len(types)} entries for {count} layers.")
    return types and types[:count]


def windows(c: Keys, count: int, *, pattern: int | None = None) -> list[int | None]:
    """Window of each layer from layer_types, or every ``pattern``-th layer without one."""
    window = c.get("sliding_window")
    types = layer_types(c, count)
    if types is not None:
        return [_window_of(c, kind, window) for kind in types]
    if pattern:
        width = c.number("sliding_window")
        return [None if (i + 1) % pattern == 0 else width for i in range(count)]
    return [None] * count


def _window_of(c: Keys, kind: str, window: Any) -> int | None:
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise SizingError(
                f"{c.where}: layer_types has sliding_attention, but sliding_window is {window!r}."
            )
        return window
    raise SizingError(
        f"{c.where}: layer_types: {kind!r} is a kind of layer that is not known here; the model "
        "is not sized rather than guessed."
    )
