"""Architectures by family, and the table of them.

Each builder follows the file of vllm/model_executor/models named in its docstring. It takes the
keys of the language model (``text_config`` where there is one) and those of the whole
config.json. A new architecture is a builder in its family's module and a line here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..arch import Model
from ..reader import Keys
from . import deepseek, gemma, glm, gpt_oss, llama, minimax, qwen

Builder = Callable[[Keys, Keys], Model]

BUILDERS: dict[str, Builder] = {
    "LlamaForCausalLM": llama.llama,
    "AquilaForCausalLM": llama.llama,
    "InternLM3ForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "MixtralForCausalLM": llama.mixtral,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen2MoeForCausalLM": qwen.qwen2_moe,
    "Qwen2VLForConditionalGeneration": qwen.qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen.qwen2_5_vl,
    "Qwen3ForCausalLM": qwen.qwen3,
    "Qwen3MoeForCausalLM": qwen.qwen3_moe,
    "Qwen3NextForCausalLM": qwen.qwen3_next,
    "Qwen3VLForConditionalGeneration": qwen.qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen.qwen3_vl_moe,
    "Qwen3_5ForCausalLM": qwen.qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen.qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen.qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen.qwen3_5_moe,
    "ChatGLMModel": glm.chatglm,
    "ChatGLMForConditionalGeneration": glm.chatglm,
    "GLM4VForCausalLM": glm.chatglm,
    "GlmForCausalLM": glm.glm,
    "Glm4ForCausalLM": glm.glm4,
    "Glm4vForConditionalGeneration": glm.glm4v,
    "Glm4MoeForCausalLM": glm.glm4_moe,
    "Glm4vMoeForConditionalGeneration": glm.glm4v_moe,
    "Glm4MoeLiteForCausalLM": deepseek.deepseek,
    "GlmMoeDsaForCausalLM": deepseek.deepseek,
    "DeepseekV2ForCausalLM": deepseek.deepseek,
    "DeepseekV3ForCausalLM": deepseek.deepseek,
    "DeepseekV32ForCausalLM": deepseek.deepseek,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Gemma3ForConditionalGeneration": gemma.gemma3,
    "Gemma4ForCausalLM": gemma.gemma4,
    "Gemma4ForConditionalGeneration": gemma.gemma4,
    "GptOssForCausalLM": gpt_oss.gpt_oss,
    "MiniMaxM2ForCausalLM": minimax.minimax_m2,
}
