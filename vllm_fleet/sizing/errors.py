"""What a planner cannot size, said in one sentence."""

from __future__ import annotations


class SizingError(ValueError):
    """A model, setting or version that cannot be sized.

    The message says what, where (the config key), why and what to do. Nothing is ever sized
    from a guess instead.
    """


class RefusedError(SizingError):
    """What vLLM itself refuses to start with, whatever the memory."""
