"""Settings of a model as options of ``vllm serve``: adapters, sampling, reasoning. Pure.

What a model sets here stands below `vllm_args`, and nothing may be set in both.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_fleet.causes.table import parse_version
from vllm_fleet.engine import SPAN_OPTIONS
from vllm_fleet.spec.model import Instance, Model

# Before, vLLM leaves these defaults out without a word: get_diff_sampling_param in
# vllm/config/model.py of the wheels 0.18.0 to 0.33.0.
DEFAULTS_SINCE = {"presence_penalty": "0.31.0", "frequency_penalty": "0.31.0"}


def unheard(model: Model, version: str) -> dict[str, str]:
    """Defaults of sampling that a version would not take, with the first one that does."""
    given = model.generation_config.model_dump(exclude_none=True)
    return {
        key: since
        for key, since in DEFAULTS_SINCE.items()
        if key in given and parse_version(version) < parse_version(since)
    }


def setting_options(name: str, model: Model) -> dict[str, tuple[str, object]]:
    """By long name of an option: the setting it comes from, and its value."""
    found: dict[str, tuple[str, object]] = {}
    if model.adapters:
        found["enable-lora"] = "adapters", True
        # As JSON: a path may hold `=`; with it the listing tells what the adapter stands on.
        found["lora-modules"] = (
            "adapters",
            [
                {"name": one, "path": adapter.path, "base_model_name": name}
                for one, adapter in model.adapters.items()
            ],
        )
        found["max-lora-rank"] = "adapters", max(one.rank for one in model.adapters.values())
        # Those that may compute in one step; the memory of each is taken at the start.
        found["max-loras"] = "adapters", len(model.adapters)
    if sampling := model.generation_config.model_dump(exclude_none=True):
        found["override-generation-config"] = "generation_config", sampling
    reasoning = model.reasoning
    if reasoning is not None:
        found["reasoning-parser"] = "reasoning", reasoning.parser
        if reasoning.thinking is not None:
            kwargs = {reasoning.thinking_key: reasoning.thinking}
            found["default-chat-template-kwargs"] = "reasoning", kwargs
        if reasoning.budget:
            # Without it a request's `thinking_token_budget` is refused.
            found["reasoning-config"] = (
                "reasoning",
                {
                    "reasoning_start_str": reasoning.begins,
                    "reasoning_end_str": reasoning.ends,
                },
            )
    return found


def given_options(name: str, model: Model, instance: Instance) -> Mapping[str, object]:
    """All that the operator gives an instance: settings of its model, then `vllm_args` of both."""
    settings = {option: value for option, (_, value) in setting_options(name, model).items()}
    written = {
        option: value
        for option, value in model.vllm_args.items()
        # How a span is split is its own affair; the model's other instances go by these.
        if instance.span is None or option.replace("_", "-") not in SPAN_OPTIONS
    }
    return {**settings, **written, **instance.vllm_args}
