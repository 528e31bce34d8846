"""Options that articles and old scripts still name, and what to write instead.

Options that left vLLM within the versions of vllm_fleet/data/vllm are found by comparing those;
this table holds what is older, what never existed, and the remedy for both.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gone:
    """Why an option is refused; ``instead`` is what to write, empty for nothing."""

    why: str
    instead: str


_V0 = "belonged to the V0 engine, which is gone"
_SPECULATIVE = Gone(
    "removed: speculative decoding is one option",
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
)
_GUIDED = Gone(
    "renamed with the rest of guided decoding", "--structured-outputs-config.backend auto"
)
_ROPE = Gone(
    "removed: rotary settings are the model's",
    '--hf-overrides \'{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}\'',
)
_REQUESTS = Gone(
    "removed: requests are not logged unless asked for",
    "nothing, or --enable-log-requests to log them",
)
_TASK = Gone(
    "removed: the kind of model is told by its runner",
    "nothing for a chat model, --runner pooling for embeddings and rerankers",
)
_LEAVE_OUT = "nothing: leave it out"
_EMBEDDED_THINKING = Gone(
    "no option of vLLM",
    "the request parameter thinking_token_budget, with --reasoning-config on the server",
)

OPTIONS: dict[str, Gone] = {
    "--disable-log-requests": _REQUESTS,
    "--no-disable-log-requests": _REQUESTS,
    "--enable-reasoning": Gone(
        "removed: naming the parser switches reasoning on", "--reasoning-parser NAME alone"
    ),
    "--task": _TASK,
    "--use-v2-block-manager": Gone(f"removed: it {_V0}", _LEAVE_OUT),
    "--worker-cluster-size": Gone(
        "never was an option of vLLM",
        "--tensor-parallel-size N and --pipeline-parallel-size N; over hosts also --nnodes N",
    ),
    "--worker-use-ray": Gone("removed", "--distributed-executor-backend ray"),
    "--engine-use-ray": Gone("removed", "--distributed-executor-backend ray"),
    "--enable-thinking": Gone(
        "no option of vLLM: it is a parameter of the chat template",
        "--default-chat-template-kwargs '{\"enable_thinking\": true}'",
    ),
    "--thinking-budget": _EMBEDDED_THINKING,
    "--thinking-token-budget": _EMBEDDED_THINKING,
    "--num-scheduler-steps": Gone(f"removed: multi-step scheduling {_V0}", _LEAVE_OUT),
    "--multi-step-stream-outputs": Gone(f"removed: it {_V0}", _LEAVE_OUT),
    "--scheduler-delay-factor": Gone(f"removed: it {_V0}", _LEAVE_OUT),
    "--swap-space": Gone(
        "removed: preempted requests are computed again, not swapped",
        f"{_LEAVE_OUT}, or --kv-offloading-size GIB to keep KV in main memory",
    ),
    "--preemption-mode": Gone(f"removed: it {_V0}", _LEAVE_OUT),
    "--num-lookahead-slots": Gone(f"removed: it {_V0}", _LEAVE_OUT),
    "--disable-async-output-proc": Gone(f"removed: it {_V0}", _LEAVE_OUT),
    "--max-seq-len-to-capture": Gone(
        "removed: CUDA graphs are captured by batch size", "--max-cudagraph-capture-size N"
    ),
    "--max-context-len-to-capture": Gone(
        "removed: CUDA graphs are captured by batch size", "--max-cudagraph-capture-size N"
    ),
    "--cuda-graph-sizes": Gone("renamed", "--cudagraph-capture-sizes"),
    "--device": Gone("removed: the installed build decides", _LEAVE_OUT),
    "--rope-scaling": _ROPE,
    "--rope-theta": Gone(
        "removed: rotary settings are the model's",
        '--hf-overrides \'{"rope_parameters": {"rope_theta": 1000000}}\'',
    ),
    "--speculative-model": _SPECULATIVE,
    "--num-speculative-tokens": _SPECULATIVE,
    "--speculative-draft-tensor-parallel-size": _SPECULATIVE,
    "--speculative-max-model-len": _SPECULATIVE,
    "--ngram-prompt-lookup-max": _SPECULATIVE,
    "--ngram-prompt-lookup-min": _SPECULATIVE,
    "--guided-decoding-backend": _GUIDED,
    "--guided-decoding-disable-fallback": _GUIDED,
    "--guided-decoding-disable-any-whitespace": Gone(
        "renamed with the rest of guided decoding",
        "--structured-outputs-config.disable_any_whitespace true",
    ),
    "--override-pooler-config": Gone("renamed", "--pooler-config"),
    "--lora-extra-vocab-size": Gone("removed: adapters may not add tokens", _LEAVE_OUT),
    "--long-lora-scaling-factors": Gone("removed", _LEAVE_OUT),
    "--enable-prompt-adapter": Gone(f"removed: it {_V0}", _LEAVE_OUT),
    "--disable-mm-preprocessor-cache": Gone("renamed", "--mm-processor-cache-gb 0"),
    "--enable-multimodal-encoder-data-parallel": Gone("renamed", "--mm-encoder-tp-mode data"),
    "--disable-frontend-multiprocessing": Gone(
        "removed: the engine always has a process of its own", _LEAVE_OUT
    ),
    "--max-num-partial-prefills": Gone(
        "removed: the engine never ran several long prompts in one step, and refused to start "
        "with another value than the default",
        f"{_LEAVE_OUT}, or --long-prefill-token-threshold N to bound a prompt's share of a step",
    ),
    "--max-long-partial-prefills": Gone(
        "removed: the engine never ran several long prompts in one step, and refused to start "
        "with another value than the default",
        f"{_LEAVE_OUT}, or --long-prefill-token-threshold N to bound a prompt's share of a step",
    ),
    "--calculate-kv-scales": Gone(
        "removed: scales come with the checkpoint, else they are 1.0",
        f"{_LEAVE_OUT}, or --kv-cache-dtype fp8_per_token_head",
    ),
    "--override-attention-dtype": Gone("removed", _LEAVE_OUT),
    "--enable-bf16x3-router-gemm": Gone("removed", _LEAVE_OUT),
    "--enable-mamba-fine-grained-prefix-cache": Gone("removed", _LEAVE_OUT),
}

# Quantization methods that vLLM dropped within the versions here.
QUANTIZATION: dict[str, str] = {
    "gguf": "safetensors weights of the same model; GGUF left vLLM",
    "bitsandbytes": "an AWQ, GPTQ or FP8 checkpoint of the model, or --quantization fp8",
    "ptpc_fp8": "--quantization fp8",
    "petit_nvfp4": "--quantization modelopt_fp4",
    "int4": "a checkpoint quantised to 4 bits (AWQ or GPTQ), and no --quantization",
    "int8": "a checkpoint quantised to 8 bits, and no --quantization",
}

# Parameters of a request that vLLM ignores without a word, and the one that works.
REQUEST: dict[str, Gone] = {
    "thinking_budget": Gone(
        "is ignored by vLLM",
        "thinking_token_budget in the request, with --reasoning-config on the server",
    ),
    "enable_thinking": Gone(
        "is ignored at this place", 'chat_template_kwargs: {"enable_thinking": false}'
    ),
    "max_new_tokens": Gone("is ignored by vLLM", "max_tokens"),
}
