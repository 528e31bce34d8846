"""Architectures: a config.json in, the model as vLLM builds it out.

The builders are in archs/, by family. An architecture that is not there is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vllm_fleet import engine_data

from .arch import Model
from .archs import BUILDERS
from .archs.gemma import GEMMA3_DEFAULTS
from .errors import SizingError
from .reader import Keys

#: model_type -> architecture, where config.json names none (transformers class dumps)
BY_TYPE = {
    "chatglm": "ChatGLMModel",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

#: Known to a vLLM, but not sized here: why. Better refused than guessed.
NOT_SIZED = {
    "Glm5NextForCausalLM": "the pooled sparse keys, linear attention and hyper-connections of "
    "GLM-5.3 (Glm5Next) are not sized yet",
    "Glm5NextForConditionalGeneration": "the pooled sparse keys, linear attention and "
    "hyper-connections of GLM-5.3 (Glm5Next) are not sized yet",
    "DeepseekV4ForCausalLM": "DeepSeek-V4's compressed KV caches are not sized yet",
    "KimiLinearForCausalLM": "Kimi-Linear's KDA layers are not sized yet",
}


def check_version(config: Mapping[str, Any], version: str, where: str) -> None:
    """Refuses a model that a version does not know, naming the one that does."""
    names = config.get("architectures") or [BY_TYPE.get(str(config.get("model_type")))]
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        return  # told by build
    problems = [engine_data.architecture_problem(version, name) for name in names]
    if all(problems):
        raise SizingError(f"{where}: {problems[0]}.")


def build(config: Mapping[str, Any], where: str = "config.json") -> Model:
    """The model of a config.json. Raises SizingError for what is not known."""
    return _built(json.dumps(config), where)


@lru_cache(maxsize=64)  # settings are found by sizing the same model many times
def _built(text: str, where: str) -> Model:
    config = json.loads(text)
    names = config.get("architectures")
    if names is not None and (
        not isinstance(names, list) or not all(isinstance(n, str) for n in names)
    ):
        raise SizingError(f"{where}: architectures: a list of names is wanted, not {names!r}.")
    warnings: list[str] = []
    if not names:
        kind = config.get("model_type")
        if not isinstance(kind, str):
            raise SizingError(
                f"{where}: neither 'architectures' nor 'model_type' is there: this is no "
                "config.json of a model."
            )
        if kind not in BY_TYPE:
            raise SizingError(
                f"{where}: architectures is missing and model_type {kind!r} is not known."
            )
        names = [BY_TYPE[kind]]
        warnings.append(f"architectures is missing; {names[0]} taken from model_type {kind}")
    name = next((n for n in names if n in BUILDERS), names[0])
    pooling = False
    if name not in BUILDERS:
        made_of = next((base for base in engine_data.bases(name) if base in BUILDERS), None)
        if made_of is not None:
            name, pooling = made_of, True
    if name not in BUILDERS:
        reason = NOT_SIZED.get(name, "this planner does not know how it lays out memory")
        first = engine_data.first_version_with(name)
        if first is None:
            raise SizingError(
                f"{where}: architecture {name} is not known to any vLLM from "
                f"{engine_data.versions()[0]} to {engine_data.versions()[-1]}, nor to this "
                "planner. Check `architectures` in config.json."
            )
        if first != engine_data.versions()[0]:
            reason = f"vLLM serves it from {first} on; {reason}"
        raise SizingError(
            f"{where}: architecture {name} cannot be sized: {reason}. Start it once and read "
            "vLLM's own 'Model loading took' and 'GPU KV cache size' lines."
        )
    text = config.get("text_config")
    defaulted: list[str] = []
    defaults = GEMMA3_DEFAULTS if name.startswith("Gemma3") else None
    top = Keys(config, where, None, defaulted)
    if isinstance(text, Mapping):
        inner = Keys({**text}, f"{where}: text_config", defaults, defaulted)
    else:
        inner = Keys(config, where, defaults, defaulted)
    model = BUILDERS[name](inner, top)
    if defaulted:
        warnings.append(
            "taken from the model class's defaults, absent in config.json: " + ", ".join(defaulted)
        )
    return replace(
        model,
        architecture=names[0],
        warnings=(*warnings, *model.warnings),
        dtype=str(
            inner.get("dtype", "torch_dtype", default=None)
            or top.get("dtype", "torch_dtype", default="bfloat16")
        ),
        generates=model.generates and not pooling,
    )
