"""Architectures: a config.json in, the model as vLLM builds it out.

Each builder follows the file of vllm/model_executor/models named in its docstring. An
architecture that is not here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .arch import Attention, Latent, Layer, Model, State, Vision, Weight
from .errors import SizingError
from .reader import Keys

Builder = Callable[[Keys, Keys], Model]
BUILDERS: dict[str, Builder] = {}

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

#: first vLLM that knows an architecture, where that is after 0.18 (models/registry.py)
SINCE = {
    "Gemma4ForCausalLM": (0, 19),
    "Gemma4ForConditionalGeneration": (0, 19),
}

#: Known to a vLLM, but not sized here: why. Better refused than guessed.
NOT_SIZED = {
    "Glm5NextForCausalLM": "GLM-5.3 (Glm5Next) is served from vLLM 0.30.0 on; its pooled "
    "sparse keys, linear attention and hyper-connections are not sized yet",
    "Glm5NextForConditionalGeneration": "GLM-5.3 (Glm5Next) is served from vLLM 0.30.0 on; its "
    "pooled sparse keys, linear attention and hyper-connections are not sized yet",
    "DeepseekV4ForCausalLM": "DeepSeek-V4's compressed KV caches are not sized yet",
    "KimiLinearForCausalLM": "Kimi-Linear's KDA layers are not sized yet",
}

#: Class defaults that published config.json files leave out (Gemma 3's do).
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}


def architecture(*names: str) -> Callable[[Builder], Builder]:
    """Registers a builder for architecture names."""

    def register(builder: Builder) -> Builder:
        for name in names:
            BUILDERS[name] = builder
        return builder

    return register


def build(config: Mapping[str, Any], where: str = "config.json") -> Model:
    """The model of a config.json. Raises SizingError for what is not known."""
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
        base = name.removesuffix("ForSequenceClassification").removesuffix("Model")
        if name != base and f"{base}ForCausalLM" in BUILDERS:
            name, pooling = f"{base}ForCausalLM", True
    if name not in BUILDERS:
        reason = NOT_SIZED.get(name, "this planner does not know how it lays out memory")
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
    return Model(
        **{
            **model.__dict__,
            "architecture": names[0],
            "warnings": (*warnings, *model.warnings),
            "dtype": str(
                inner.get("dtype", "torch_dtype", default=None)
                or top.get("dtype", "torch_dtype", default="bfloat16")
            ),
            "generates": model.generates and not pooling,
        }
    )


# Pieces


def _dims(c: Keys) -> tuple[int, int, int, int]:
    """heads, kv heads, head width, hidden."""
    hidden = c.number("hidden_size")
    heads = c.number("num_attention_heads")
    kv = c.number("num_key_value_heads", default=heads)
    head = c.maybe("head_dim")
    if head is None:
        if hidden % heads:
            raise SizingError(
                f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads "
                f"{heads} and head_dim is missing."
            )
        head = hidden // heads
    return heads, kv, head, hidden


def _attention_weights(
    prefix: str,
    hidden: int,
    heads: int,
    kv: int,
    head: int,
    *,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: int = 0,
    q_factor: int = 1,
) -> list[Weight]:
    weights = [
        Weight(f"{prefix}.q_proj", heads * head * q_factor, hidden, "out", "linear", bias=bias),
        Weight(f"{prefix}.k_proj", kv * head, hidden, "kv", "linear", bias=bias, heads=kv),
        Weight(f"{prefix}.v_proj", kv * head, hidden, "kv", "linear", bias=bias, heads=kv),
        Weight(f"{prefix}.o_proj", hidden, heads * head, "in", "linear", bias=out_bias),
    ]
    if qk_norm:
        weights.append(Weight(f"{prefix}.qk_norm", 2 * qk_norm))
    return weights


def _mlp_weights(prefix: str, hidden: int, width: int, *, bias: bool = False) -> list[Weight]:
    return [
        Weight(f"{prefix}.gate_proj", width, hidden, "out", "linear", bias=bias),
        Weight(f"{prefix}.up_proj", width, hidden, "out", "linear", bias=bias),
        Weight(f"{prefix}.down_proj", hidden, width, "in", "linear", bias=bias),
    ]


def _expert_weights(
    prefix: str,
    hidden: int,
    width: int,
    count: int,
    *,
    gate_element: float | None = None,
    gate_bias: bool = False,
    correction: bool = False,
    gate: str = "gate",
    bias: bool = False,
) -> list[Weight]:
    weights = [
        Weight(f"{prefix}.{gate}", count, hidden, element=gate_element, bias=gate_bias),
        Weight(f"{prefix}.experts", 2 * width, hidden, "out", "expert", count, bias=bias),
        Weight(f"{prefix}.experts", hidden, width, "in", "expert", count, bias=bias),
    ]
    if correction:
        weights.append(Weight(f"{prefix}.correction", count, element=4))
    return weights


def _norms(prefix: str, hidden: int, count: int) -> Weight:
    return Weight(f"{prefix}.norms", hidden * count)


def _rotary(positions: int, width: int, element: float | None = None) -> Weight:
    """cos and sin of every position: rotary_embedding/base.py: cos_sin_cache."""
    return Weight("rotary", positions, width, element=element)


def _windows(c: Keys, layers: int, *, pattern: int | None = None) -> list[int | None]:
    """Window of each layer from layer_types, or every ``pattern``-th layer without one."""
    window = c.get("sliding_window")
    types = c.names("layer_types")
    if types is not None:
        if len(types) < layers:
            raise SizingError(
                f"{c.where}: layer_types has {len(types)} entries for {layers} layers."
            )
        return [_window_of(c, t, window) for t in types[:layers]]
    if pattern:
        width = c.number("sliding_window")
        return [None if (i + 1) % pattern == 0 else width for i in range(layers)]
    return [None] * layers


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


def _embedding(c: Keys, vocab: int, hidden: int, name: str = "model.embed_tokens") -> Weight:
    return Weight(name, vocab, hidden, "vocab", "embedding")


def _head(vocab: int, hidden: int, name: str = "lm_head") -> Weight:
    return Weight(name, vocab, hidden, "vocab", "head")


def _tied(c: Keys, top: Keys, default: bool = False) -> bool:
    if c.data.get("tie_word_embeddings") is not None:
        return c.flag("tie_word_embeddings")
    return top.flag("tie_word_embeddings", default=default)


def _max_len(c: Keys) -> int:
    return c.number("max_position_embeddings", "seq_length", "n_positions", "max_seq_len")


def _rotary_positions(c: Keys, positions: int) -> int:
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
            return int(original * factor)
    return positions


def _partial(c: Keys, head: int, default: float = 1.0) -> int:
    """Rotary width of a head."""
    scaling = c.get("rope_parameters")
    inner = scaling.get("partial_rotary_factor") if isinstance(scaling, Mapping) else None
    factor = inner if inner is not None else c.get("partial_rotary_factor", default=default)
    return int(head * c.share("partial_rotary_factor", factor))


def _dense(
    c: Keys,
    top: Keys,
    family: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norms: int = 2,
    windows: list[int | None] | None = None,
    tied: bool = False,
    prefix: str = "model",
    rotary: float = 1.0,
) -> Model:
    """Attention and a gated MLP: llama.py and what derives from it."""
    heads, kv, head, hidden = _dims(c)
    count = c.number("num_hidden_layers")
    width = c.number("intermediate_size")
    vocab = c.number("vocab_size")
    positions = _max_len(c)
    windows = windows or [None] * count
    layers = []
    for i in range(count):
        p = f"{prefix}.layers.{i}"
        weights = [
            *_attention_weights(
                f"{p}.self_attn",
                hidden,
                heads,
                kv,
                head,
                bias=bias,
                out_bias=out_bias,
                qk_norm=head if qk_norm else 0,
            ),
            *_mlp_weights(f"{p}.mlp", hidden, width, bias=mlp_bias),
            _norms(p, hidden, norms),
        ]
        layers.append(
            Layer(
                i,
                Attention(kv, head, head, windows[i]),
                tuple(weights),
                mlp=width,
                qkv=(heads + 2 * kv) * head,
                attention_out=heads * head,
            )
        )
    return Model(
        architecture="",
        family=family,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layers),
        embedding=_embedding(c, vocab, hidden, f"{prefix}.embed_tokens"),
        head=None if _tied(c, top, tied) else _head(vocab, hidden),
        others=(_norms(prefix, hidden, 1),),
        every=(_rotary(_rotary_positions(c, positions), _partial(c, head, rotary)),),
        max_len=positions,
        divide=(("attention heads", heads), ("MLP width", width)),
    )


@architecture("LlamaForCausalLM", "AquilaForCausalLM", "InternLM3ForCausalLM")
def _llama(c: Keys, top: Keys) -> Model:
    """llama.py"""
    bias = c.flag("attention_bias", default=False) or c.flag("bias", default=False)
    return _dense(
        c, top, "llama", bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", default=False)
    )


@architecture("MistralForCausalLM")
def _mistral(c: Keys, top: Keys) -> Model:
    """mistral.py: every layer has the window, where the config has one"""
    count = c.number("num_hidden_layers")
    windows: list[int | None] = [c.maybe("sliding_window")] * count
    return _dense(c, top, "mistral", windows=windows)


def _qwen_windows(c: Keys) -> list[int | None]:
    count = c.number("num_hidden_layers")
    if not c.flag("use_sliding_window", default=False) or c.get("sliding_window") is None:
        return [None] * count
    if c.names("layer_types") is not None:
        return _windows(c, count)
    first = c.number("max_window_layers", default=count, least=0)
    if first != count:
        raise SizingError(
            f"{c.where}: a sliding window for some but not all layers (max_window_layers "
            f"{first} of {count}) is not served by vLLM for this model. Set "
            "use_sliding_window to false."
        )
    return [c.number("sliding_window")] * count


@architecture("Qwen2ForCausalLM")
def _qwen2(c: Keys, top: Keys) -> Model:
    """qwen2.py: biases on q, k and v"""
    return _dense(c, top, "qwen2", bias=True, windows=_qwen_windows(c))


@architecture("Qwen3ForCausalLM")
def _qwen3(c: Keys, top: Keys) -> Model:
    """qwen3.py: norms on q and k"""
    bias = c.flag("attention_bias", default=False)
    return _dense(c, top, "qwen3", bias=bias, qk_norm=True, windows=_qwen_windows(c))


@architecture("GlmForCausalLM")
def _glm(c: Keys, top: Keys) -> Model:
    """glm.py: llama with q, k, v biases and half of each head rotated"""
    return _dense(c, top, "glm", bias=c.flag("attention_bias", default=True), rotary=0.5)


@architecture("Glm4ForCausalLM")
def _glm4(c: Keys, top: Keys) -> Model:
    """glm4.py: two more norms a layer"""
    return _dense(c, top, "glm4", bias=c.flag("attention_bias", default=False), norms=4, rotary=0.5)


@architecture("ChatGLMModel", "ChatGLMForConditionalGeneration", "GLM4VForCausalLM")
def _chatglm(c: Keys, top: Keys) -> Model:
    """chatglm.py, glm4v.py: its own names for everything"""
    heads = c.number("num_attention_heads")
    hidden = c.number("hidden_size")
    head = c.number("kv_channels", default=hidden // heads)
    kv = (
        c.number("multi_query_group_num")
        if c.flag("multi_query_attention", default=False)
        else heads
    )
    count = c.number("num_layers", "num_hidden_layers")
    width = c.number("ffn_hidden_size")
    vocab = c.number("padded_vocab_size", "vocab_size")
    positions = c.number("seq_length", "max_position_embeddings")
    linear_bias = c.flag("add_bias_linear", default=False)
    qkv_bias = linear_bias or c.flag("add_qkv_bias", default=False)
    layers = []
    for i in range(count):
        p = f"transformer.encoder.layers.{i}"
        weights = [
            *_attention_weights(
                f"{p}.self_attention", hidden, heads, kv, head, bias=qkv_bias, out_bias=linear_bias
            ),
            *_mlp_weights(f"{p}.mlp", hidden, width, bias=linear_bias),
            _norms(p, hidden, 2),
        ]
        layers.append(
            Layer(
                i,
                Attention(kv, head, head),
                tuple(weights),
                mlp=width,
                qkv=(heads + 2 * kv) * head,
                attention_out=heads * head,
            )
        )
    eye = c.inner("vision_config") or top.inner("vision_config")
    return Model(
        architecture="",
        family="chatglm",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layers),
        embedding=_embedding(c, vocab, hidden, "transformer.embedding"),
        head=None if _tied(c, top) else _head(vocab, hidden, "transformer.output_layer"),
        others=(_norms("transformer", hidden, 1),),
        every=(_rotary(positions, head // 2),),
        vision=_eva_tower(eye, hidden, width) if eye is not None else None,
        max_len=positions,
        divide=(("attention heads", heads), ("MLP width", width)),
    )


@architecture("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
def _gemma3(c: Keys, top: Keys) -> Model:
    """gemma3.py: four norms a layer, norms on q and k, five windows to one full layer"""
    count = c.number("num_hidden_layers")
    pattern = c.maybe("sliding_window_pattern", "_sliding_window_pattern")
    windows = _windows(c, count, pattern=pattern)
    model = _dense(
        c,
        top,
        "gemma3",
        bias=c.flag("attention_bias", default=False),
        qk_norm=True,
        norms=4,
        windows=windows,
        tied=True,
    )
    head = model.layers[0].cache
    width = head.head if isinstance(head, Attention) else 0
    eye = top.inner("vision_config") if top is not c else None
    # Two tables: one for local, one for global layers.
    return _with(
        model,
        every=(_rotary(model.max_len, width), _rotary(model.max_len, width)),
        vision=_siglip_tower(eye, model.hidden)
        if eye is not None and "text_config" in top.data
        else None,
    )


@architecture("Gemma2ForCausalLM")
def _gemma2(c: Keys, top: Keys) -> Model:
    """gemma2.py: four norms a layer, every second layer windowed"""
    count = c.number("num_hidden_layers")
    width = c.number("sliding_window")
    windows: list[int | None] = (
        _windows(c, count)
        if c.names("layer_types") is not None
        else [width if i % 2 == 0 else None for i in range(count)]
    )
    return _dense(c, top, "gemma2", norms=4, windows=windows, tied=True)


def _with(model: Model, **changes: Any) -> Model:
    return Model(**{**model.__dict__, **changes})


@architecture("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
def _gemma4(c: Keys, top: Keys) -> Model:
    """gemma4.py: wide global heads, K reused as V, a dense and a routed MLP side by side"""
    hidden = c.number("hidden_size")
    heads = c.number("num_attention_heads")
    kv = c.number("num_key_value_heads")
    head = c.number("head_dim")
    count = c.number("num_hidden_layers")
    width = c.number("intermediate_size")
    vocab = c.number("vocab_size")
    positions = _max_len(c)
    windows = _windows(c, count)
    bias = c.flag("attention_bias", default=False)
    routed = c.flag("enable_moe_block", default=False) or c.flag(
        "use_second_mlp_block", default=False
    )
    shared = c.number("num_kv_shared_layers", default=0, least=0)
    per_layer = c.number("hidden_size_per_layer_input", default=0, least=0)
    layers = []
    for i, window in enumerate(windows):
        p = f"model.layers.{i}"
        full = window is None
        h = c.number("global_head_dim", default=head) if full else head
        k = (
            c.number("num_global_key_value_heads", default=kv)
            if full and c.flag("attention_k_eq_v", default=False)
            else kv
        )
        borrowed = shared > 0 and i >= count - shared
        w = width * (2 if borrowed and c.flag("use_double_wide_mlp", default=False) else 1)
        weights = [
            *_attention_weights(
                f"{p}.self_attn", hidden, heads, k, h, bias=bias, out_bias=bias, qk_norm=h
            ),
            *_mlp_weights(f"{p}.mlp", hidden, w),
            _norms(p, hidden, 7 if routed else 4),
        ]
        experts = top_k = expert_width = 0
        if routed:
            experts = c.number("num_experts")
            top_k = c.number("top_k_experts", "num_experts_per_tok")
            expert_width = c.number("moe_intermediate_size", "expert_intermediate_size")
            weights += _expert_weights(
                f"{p}.moe", hidden, expert_width, experts, gate="router.proj"
            )
            weights.append(Weight(f"{p}.router.scale", hidden + experts))
        if per_layer:
            weights += [
                Weight(f"{p}.per_layer_input_gate", per_layer, hidden, "whole", "linear"),
                Weight(f"{p}.per_layer_projection", hidden, per_layer, "whole", "linear"),
                _norms(f"{p}.per_layer", hidden, 1),
            ]
        layers.append(
            Layer(
                i,
                None if borrowed else Attention(k, h, h, window),
                tuple(weights),
                mlp=w,
                qkv=(heads + 2 * k) * h,
                attention_out=heads * h,
                experts=experts,
                top_k=top_k,
                expert_width=expert_width,
            )
        )
    first = []
    if per_layer:
        rows = c.number("vocab_size_per_layer_input", default=vocab)
        first = [
            Weight("model.embed_tokens_per_layer", rows, per_layer * count, "vocab", "embedding"),
            Weight("model.per_layer_model_projection", per_layer * count, hidden, "out", "linear"),
        ]
    eye = top.inner("vision_config") if "text_config" in top.data else None
    wide = c.number("global_head_dim", default=head)
    return Model(
        architecture="",
        family="gemma4",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layers),
        embedding=_embedding(c, vocab, hidden),
        head=None if _tied(c, top, True) else _head(vocab, hidden),
        others=(_norms("model", hidden, 1),),
        every=(_rotary(positions, head), _rotary(positions, wide)),
        first=tuple(first),
        vision=_gemma4_tower(eye, hidden) if eye is not None else None,
        max_len=positions,
        divide=(("attention heads", heads), ("MLP width", width)),
    )


@architecture("GptOssForCausalLM")
def _gpt_oss(c: Keys, top: Keys) -> Model:
    """gpt_oss.py: biases everywhere, sinks, a window on every second layer"""
    heads, kv, head, hidden = _dims(c)
    count = c.number("num_hidden_layers")
    experts = c.number("num_local_experts")
    top_k = c.number("num_experts_per_tok", "experts_per_token")
    width = c.number("intermediate_size")
    vocab = c.number("vocab_size")
    window = c.number("sliding_window")
    layers = []
    for i in range(count):
        p = f"model.layers.{i}"
        weights = [
            *_attention_weights(
                f"{p}.self_attn", hidden, heads, kv, head, bias=True, out_bias=True
            ),
            Weight(f"{p}.sinks", heads, 1, "out"),
            *_expert_weights(
                f"{p}.mlp", hidden, width, experts, gate="router", gate_bias=True, bias=True
            ),
            _norms(p, hidden, 2),
        ]
        layers.append(
            Layer(
                i,
                Attention(kv, head, head, window if i % 2 == 0 else None),
                tuple(weights),
                qkv=(heads + 2 * kv) * head,
                attention_out=heads * head,
                experts=experts,
                top_k=top_k,
                expert_width=width,
            )
        )
    return Model(
        architecture="",
        family="gpt_oss",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layers),
        embedding=_embedding(c, vocab, hidden),
        head=None if _tied(c, top) else _head(vocab, hidden),
        others=(_norms("model", hidden, 1),),
        every=(_rotary(_rotary_positions(c, _max_len(c)), head, 4),),
        max_len=_max_len(c),
        divide=(("attention heads", heads), ("KV heads or more", kv), ("expert width", width)),
    )


# Mixtures of experts


def _moe_layers(c: Keys, count: int, experts: int) -> list[bool]:
    """Which layers are routed: qwen3_moe.py (mlp_only_layers, decoder_sparse_step)."""
    dense = c.get("mlp_only_layers", default=[])
    step = c.number("decoder_sparse_step", default=1)
    if not isinstance(dense, list):
        raise SizingError(f"{c.where}: mlp_only_layers: a list is wanted, not {dense!r}.")
    return [i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(count)]


def _qwen_moe(c: Keys, top: Keys, family: str, *, bias: bool, qk_norm: bool, shared: bool) -> Model:
    heads, kv, head, hidden = _dims(c)
    count = c.number("num_hidden_layers")
    experts = c.number("num_experts")
    top_k = c.number("num_experts_per_tok")
    expert_width = c.number("moe_intermediate_size")
    routed = _moe_layers(c, count, experts)
    width = 0 if all(routed) else c.number("intermediate_size")
    shared_width = c.number("shared_expert_intermediate_size", default=0, least=0) if shared else 0
    vocab = c.number("vocab_size")
    layers = []
    for i in range(count):
        p = f"model.layers.{i}"
        weights = [
            *_attention_weights(
                f"{p}.self_attn", hidden, heads, kv, head, bias=bias, qk_norm=head if qk_norm else 0
            ),
            _norms(p, hidden, 2),
        ]
        if routed[i]:
            weights += _expert_weights(f"{p}.mlp", hidden, expert_width, experts)
            if shared_width:
                weights += _mlp_weights(f"{p}.mlp.shared_expert", hidden, shared_width)
                weights.append(Weight(f"{p}.mlp.shared_expert_gate", 1, hidden))
        else:
            weights += _mlp_weights(f"{p}.mlp", hidden, width)
        layers.append(
            Layer(
                i,
                Attention(kv, head, head),
                tuple(weights),
                mlp=0 if routed[i] else width,
                qkv=(heads + 2 * kv) * head,
                attention_out=heads * head,
                experts=experts if routed[i] else 0,
                top_k=top_k,
                expert_width=expert_width,
                shared_width=shared_width if routed[i] else 0,
            )
        )
    return Model(
        architecture="",
        family=family,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layers),
        embedding=_embedding(c, vocab, hidden),
        head=None if _tied(c, top) else _head(vocab, hidden),
        others=(_norms("model", hidden, 1),),
        every=(_rotary(_rotary_positions(c, _max_len(c)), head),),
        max_len=_max_len(c),
        divide=(("attention heads", heads), ("expert width", expert_width)),
    )


@architecture("Qwen2MoeForCausalLM")
def _qwen2_moe(c: Keys, top: Keys) -> Model:
    """qwen2_moe.py"""
    return _qwen_moe(c, top, "qwen2_moe", bias=True, qk_norm=False, shared=True)


@architecture("Qwen3MoeForCausalLM")
def _qwen3_moe(c: Keys, top: Keys) -> Model:
    """qwen3_moe.py"""
    bias = c.flag("attention_bias", default=False)
    return _qwen_moe(c, top, "qwen3_moe", bias=bias, qk_norm=True, shared=False)


@architecture("MixtralForCausalLM")
def _mixtral(c: Keys, top: Keys) -> Model:
    """mixtral.py"""
    heads, kv, head, hidden = _dims(c)
    count = c.number("num_hidden_layers")
    experts = c.number("num_local_experts")
    width = c.number("intermediate_size")
    vocab = c.number("vocab_size")
    window = c.maybe("sliding_window")
    layers = []
    for i in range(count):
        p = f"model.layers.{i}"
        weights = [
            *_attention_weights(f"{p}.self_attn", hidden, heads, kv, head),
            *_expert_weights(f"{p}.block_sparse_moe", hidden, width, experts),
            _norms(p, hidden, 2),
        ]
        layers.append(
            Layer(
                i,
                Attention(kv, head, head, window),
                tuple(weights),
                qkv=(heads + 2 * kv) * head,
                attention_out=heads * head,
                experts=experts,
                top_k=c.number("num_experts_per_tok"),
                expert_width=width,
            )
        )
    return Model(
        architecture="",
        family="mixtral",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layers),
        embedding=_embedding(c, vocab, hidden),
        head=None if _tied(c, top) else _head(vocab, hidden),
        others=(_norms("model", hidden, 1),),
        every=(_rotary(_max_len(c), head),),
        max_len=_max_len(c),
        divide=(("attention heads", heads), ("expert width", width)),
    )


@architecture("MiniMaxM2ForCausalLM")
def _minimax_m2(c: Keys, top: Keys) -> Model:
    """minimax_m2.py: fp32 gate, q and k norms over all heads of a card"""
    heads, kv, head, hidden = _dims(c)
    count = c.number("num_hidden_layers")
    experts = c.number("num_local_experts")
    width = c.number("intermediate_size")
    vocab = c.number("vocab_size")
    layers = []
    for i in range(count):
        p = f"model.layers.{i}"
        weights = [
            *_attention_weights(
                f"{p}.self_attn",
                hidden,
                heads,
                kv,
                head,
                bias=c.flag("attention_bias", default=False),
            ),
            Weight(f"{p}.self_attn.q_norm", heads * head, 1, "out"),
            Weight(f"{p}.self_attn.k_norm", kv * head, 1, "kv", heads=kv),
            *_expert_weights(
                f"{p}.block_sparse_moe",
                hidden,
                width,
                experts,
                gate_element=4,
                correction=c.flag("use_routing_bias", default=False),
            ),
            _norms(p, hidden, 2),
        ]
        layers.append(
            Layer(
                i,
                Attention(kv, head, head),
                tuple(weights),
                qkv=(heads + 2 * kv) * head,
                attention_out=heads * head,
                experts=experts,
                top_k=c.number("num_experts_per_tok"),
                expert_width=width,
            )
        )
    return Model(
        architecture="",
        family="minimax_m2",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layers),
        embedding=_embedding(c, vocab, hidden),
        head=None if _tied(c, top) else _head(vocab, hidden),
        others=(_norms("model", hidden, 1),),
        every=(_rotary(_max_len(c), c.number("rotary_dim", default=head)),),
        max_len=_max_len(c),
        divide=(("attention heads", heads), ("expert width", width)),
        warnings=(
            ("MTP modules of MiniMax-M2 are not loaded by vLLM",) if c.get("use_mtp") else ()
        ),
    )


@architecture("Glm4MoeForCausalLM")
def _glm4_moe(c: Keys, top: Keys) -> Model:
    """glm4_moe.py: first layers dense, fp32 gate, one shared expert"""
    heads, kv, head, hidden = _dims(c)
    count = c.number("num_hidden_layers")
    experts = c.number("n_routed_experts")
    expert_width = c.number("moe_intermediate_size")
    shared_width = c.number("n_shared_experts", default=0, least=0) * expert_width
    width = c.number("intermediate_size")
    vocab = c.number("vocab_size")
    bias = c.flag("attention_bias", default=False)
    qk_norm = c.flag("use_qk_norm", default=False)
    dense = c.number("first_k_dense_replace", default=0, least=0)

    def layer(i: int, extra: tuple[Weight, ...] = ()) -> Layer:
        p = f"model.layers.{i}"
        weights = [
            *_attention_weights(
                f"{p}.self_attn", hidden, heads, kv, head, bias=bias, qk_norm=head if qk_norm else 0
            ),
            _norms(p, hidden, 2),
        ]
        routed = i >= dense
        if routed:
            weights += _expert_weights(
                f"{p}.mlp", hidden, expert_width, experts, gate_element=4, correction=True
            )
            if shared_width:
                weights += _mlp_weights(f"{p}.mlp.shared_experts", hidden, shared_width)
        else:
            weights += _mlp_weights(f"{p}.mlp", hidden, width)
        return Layer(
            i,
            Attention(kv, head, head),
            (*weights, *extra),
            mlp=0 if routed else width,
            qkv=(heads + 2 * kv) * head,
            attention_out=heads * head,
            experts=experts if routed else 0,
            top_k=c.number("num_experts_per_tok"),
            expert_width=expert_width,
            shared_width=shared_width if routed else 0,
        )

    return Model(
        architecture="",
        family="glm4_moe",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layer(i) for i in range(count)),
        embedding=_embedding(c, vocab, hidden),
        head=None if _tied(c, top) else _head(vocab, hidden),
        others=(_norms("model", hidden, 1),),
        every=(_rotary(_rotary_positions(c, _max_len(c)), _partial(c, head, 0.5)),),
        draft=tuple(
            layer(count + i, _mtp_extra(f"model.layers.{count + i}", hidden))
            for i in range(c.number("num_nextn_predict_layers", default=0, least=0))
        ),
        max_len=_max_len(c),
        divide=(("attention heads", heads), ("expert width", expert_width), ("MLP width", width)),
    )


def _mtp_extra(prefix: str, hidden: int) -> tuple[Weight, ...]:
    """Norms and the joining projection of an MTP layer: deepseek_mtp.py, glm4_moe_mtp.py.

    Embedding and head are the target model's.
    """
    return (
        Weight(f"{prefix}.eh_proj", hidden, 2 * hidden),
        _norms(f"{prefix}.mtp", hidden, 3),
    )


@architecture(
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
)
def _deepseek(c: Keys, top: Keys) -> Model:
    """deepseek_v2.py, glm4_moe_lite.py: MLA; with index_topk a DSA indexer on every layer"""
    hidden = c.number("hidden_size")
    heads = c.number("num_attention_heads")
    rank = c.number("kv_lora_rank")
    nope = c.number("qk_nope_head_dim")
    rope = c.number("qk_rope_head_dim")
    value = c.number("v_head_dim")
    q_rank = c.maybe("q_lora_rank")
    count = c.number("num_hidden_layers")
    vocab = c.number("vocab_size")
    width = c.number("intermediate_size")
    experts = c.number("n_routed_experts", default=0, least=0)
    expert_width = c.number("moe_intermediate_size") if experts else 0
    top_k = c.number("num_experts_per_tok") if experts else 0
    shared_width = c.number("n_shared_experts", default=0, least=0) * expert_width
    dense = c.number("first_k_dense_replace", default=0, least=0)
    every = c.number("moe_layer_freq", default=1)
    types = c.names("mlp_layer_types")
    corrected = c.get("topk_method") == "noaux_tc"
    glm_lite = c.get("model_type") == "glm4_moe_lite"
    indexer: int | None = None
    if c.get("index_topk") is not None:
        key = c.number("index_head_dim")
        indexer = key + key // 128 * 4
    attention_bias = c.flag("attention_bias", default=False)

    def attention(p: str) -> list[Weight]:
        weights = []
        if q_rank is None:
            weights.append(Weight(f"{p}.q_proj", heads * (nope + rope), hidden, "out", "linear"))
        else:
            weights += [
                Weight(f"{p}.q_a_proj", q_rank, hidden, "whole", "linear", bias=attention_bias),
                Weight(f"{p}.q_a_layernorm", q_rank),
                Weight(f"{p}.q_b_proj", heads * (nope + rope), q_rank, "out", "linear"),
            ]
        weights += [
            Weight(
                f"{p}.kv_a_proj_with_mqa",
                rank + rope,
                hidden,
                "whole",
                "linear",
                bias=attention_bias,
            ),
            Weight(f"{p}.kv_a_layernorm", rank),
            Weight(f"{p}.kv_b_proj", heads * (nope + value), rank, "out", "linear"),
            Weight(f"{p}.o_proj", hidden, heads * value, "in", "linear", bias=attention_bias),
        ]
        if indexer is not None and q_rank is not None:
            n = c.number("index_n_heads")
            key = c.number("index_head_dim")
            weights += [
                Weight(f"{p}.indexer.wq_b", n * key, q_rank, "whole", "linear"),
                # wk is dequantised on loading and joined with weights_proj.
                Weight(f"{p}.indexer.wk_weights_proj", key + n, hidden),
                Weight(f"{p}.indexer.k_norm", 2 * key, element=4),
            ]
        return weights

    if indexer is not None and q_rank is None:
        raise SizingError(f"{c.where}: index_topk without q_lora_rank is not a known layout.")

    def layer(i: int, extra: tuple[Weight, ...] = ()) -> Layer:
        p = f"model.layers.{i}"
        routed = experts > 0 and i >= dense and i % every == 0
        if types is not None and i < len(types):
            if types[i] not in ("dense", "sparse"):
                raise SizingError(
                    f"{c.where}: mlp_layer_types: {types[i]!r} is a kind of layer that is not "
                    "known here."
                )
            routed = types[i] == "sparse"
        weights = [*attention(f"{p}.self_attn"), _norms(p, hidden, 2)]
        if routed:
            weights += _expert_weights(
                f"{p}.mlp",
                hidden,
                expert_width,
                experts,
                gate_element=4 if glm_lite else None,
                correction=corrected,
            )
            if shared_width:
                weights += _mlp_weights(f"{p}.mlp.shared_experts", hidden, shared_width)
        else:
            weights += _mlp_weights(f"{p}.mlp", hidden, width)
        return Layer(
            i,
            Latent(rank + rope, indexer),
            (*weights, *extra),
            mlp=0 if routed else width,
            qkv=heads * (nope + rope) + (rank + rope),
            attention_out=heads * value,
            experts=experts if routed else 0,
            top_k=top_k,
            expert_width=expert_width,
            shared_width=shared_width if routed else 0,
        )

    return Model(
        architecture="",
        family="deepseek",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layer(i) for i in range(count)),
        embedding=_embedding(c, vocab, hidden),
        head=None if _tied(c, top) else _head(vocab, hidden),
        others=(_norms("model", hidden, 1),),
        every=(_rotary(_rotary_positions(c, _max_len(c)), rope),),
        draft=tuple(
            layer(count + i, _mtp_extra(f"model.layers.{count + i}", hidden))
            for i in range(c.number("num_nextn_predict_layers", default=0, least=0))
        ),
        max_len=_max_len(c),
        divide=(
            ("attention heads", heads),
            ("MLP width", width),
            *((("expert width", expert_width),) if experts else ()),
        ),
        latent_heads=heads,
        latent_up=(nope + value) * rank,
        latent_rank=rank,
    )


# Linear attention


def _delta_net(c: Keys, *, float32: bool) -> tuple[State, Callable[[str, int], list[Weight]]]:
    """mamba/gdn_linear_attn.py: GatedDeltaNetAttention"""
    state = State(
        key_heads=c.number("linear_num_key_heads"),
        value_heads=c.number("linear_num_value_heads"),
        key_head=c.number("linear_key_head_dim"),
        value_head=c.number("linear_value_head_dim"),
        kernel=c.number("linear_conv_kernel_dim"),
        float32=float32,
    )
    keys = state.key_heads * state.key_head
    values = state.value_heads * state.value_head

    def weights(p: str, hidden: int) -> list[Weight]:
        return [
            Weight(f"{p}.in_proj_qkv", 2 * keys + values, hidden, "out", "linear"),
            Weight(f"{p}.in_proj_z", values, hidden, "out", "linear"),
            Weight(f"{p}.in_proj_ba", 2 * state.value_heads, hidden, "out", "linear"),
            Weight(f"{p}.conv1d", 2 * keys + values, state.kernel, "out"),
            Weight(f"{p}.dt_bias", state.value_heads, 1, "out"),
            Weight(f"{p}.A_log", state.value_heads, 1, "out", element=4),
            Weight(f"{p}.norm", state.value_head),
            Weight(f"{p}.out_proj", hidden, values, "in", "linear"),
        ]

    return state, weights


def _qwen_hybrid(c: Keys, top: Keys, family: str, *, routed: bool) -> Model:
    """qwen3_next.py, qwen3_5.py: three gated delta nets to one gated full attention"""
    heads, kv, head, hidden = _dims(c)
    count = c.number("num_hidden_layers")
    vocab = c.number("vocab_size")
    positions = _max_len(c)
    types = c.names("layer_types")
    if types is None:
        every = c.number("full_attention_interval", default=4)
        types = [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
        ]
    if len(types) < count:
        raise SizingError(f"{c.where}: layer_types has {len(types)} entries for {count} layers.")
    gated = 2 if c.flag("attn_output_gate", default=True) else 1
    # Qwen3.5 configs ask for a float32 state; else it follows the model's dtype.
    float32 = c.get("mamba_ssm_dtype") == "float32"
    state, state_weights = _delta_net(c, float32=float32)
    experts = c.number("num_experts") if routed else 0
    expert_width = c.number("moe_intermediate_size") if routed else 0
    top_k = c.number("num_experts_per_tok") if routed else 0
    shared_width = c.number("shared_expert_intermediate_size", default=0, least=0) if routed else 0
    sparse = _moe_layers(c, count, experts)
    width = 0 if all(sparse) else c.number("intermediate_size")
    prefix = "model.language_model" if "text_config" in top.data else "model"

    def layer(i: int, kind: str, name: str, extra: tuple[Weight, ...] = ()) -> Layer:
        mtp = i >= count
        is_sparse = routed if mtp else sparse[i]
        weights = [_norms(name, hidden, 2)]
        cache: Attention | State
        if kind == "full_attention":
            weights += _attention_weights(
                f"{name}.self_attn",
                hidden,
                heads,
                kv,
                head,
                qk_norm=head,
                q_factor=gated,
                bias=c.flag("attention_bias", default=False),
            )
            cache = Attention(kv, head, head)
            qkv, out = (gated * heads + 2 * kv) * head, heads * head
        elif kind == "linear_attention":
            weights += state_weights(f"{name}.linear_attn", hidden)
            cache = state
            values = state.value_heads * state.value_head
            qkv = 2 * state.key_heads * state.key_head + 2 * values
            out = values
        else:
            raise SizingError(
                f"{c.where}: layer_types: {kind!r} is a kind of layer that is not known here."
            )
        if is_sparse:
            weights += _expert_weights(f"{name}.mlp", hidden, expert_width, experts)
            if shared_width:
                weights += _mlp_weights(f"{name}.mlp.shared_expert", hidden, shared_width)
                weights.append(Weight(f"{name}.mlp.shared_expert_gate", 1, hidden))
        else:
            weights += _mlp_weights(f"{name}.mlp", hidden, width)
        return Layer(
            i,
            cache,
            (*weights, *extra),
            mlp=0 if is_sparse else width,
            qkv=qkv,
            attention_out=out,
            experts=experts if is_sparse else 0,
            top_k=top_k,
            expert_width=expert_width,
            shared_width=shared_width if is_sparse else 0,
        )

    drafts = c.number("mtp_num_hidden_layers", default=0, least=0)
    return Model(
        architecture="",
        family=family,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        layers=tuple(layer(i, types[i], f"{prefix}.layers.{i}") for i in range(count)),
        embedding=_embedding(c, vocab, hidden, f"{prefix}.embed_tokens"),
        head=None if _tied(c, top) else _head(vocab, hidden),
        others=(_norms(prefix, hidden, 1),),
        every=(_rotary(positions, _partial(c, head, 0.25)),),
        draft=tuple(
            layer(
                count + i,
                "full_attention",
                f"mtp.layers.{i}",
                (Weight("mtp.fc", hidden, 2 * hidden), _norms("mtp", hidden, 3)),
            )
            for i in range(drafts)
        ),
        max_len=positions,
        divide=(
            ("attention heads", heads),
            ("linear key heads", state.key_heads),
            ("linear value heads", state.value_heads),
            *((("expert width", expert_width),) if routed else (("MLP width", width),)),
        ),
    )


@architecture("Qwen3NextForCausalLM")
def _qwen3_next(c: Keys, top: Keys) -> Model:
    """qwen3_next.py"""
    return _qwen_hybrid(c, top, "qwen3_next", routed=True)


@architecture("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
def _qwen35(c: Keys, top: Keys) -> Model:
    """qwen3_5.py"""
    return _seeing(_qwen_hybrid(c, top, "qwen3_5", routed=False), top, _qwen3_vl_tower)


@architecture("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
def _qwen35_moe(c: Keys, top: Keys) -> Model:
    """qwen3_5.py"""
    return _seeing(_qwen_hybrid(c, top, "qwen3_5", routed=True), top, _qwen3_vl_tower)


# Vision


def _seeing(model: Model, top: Keys, tower: Callable[[Keys, int], Vision]) -> Model:
    eye = top.inner("vision_config")
    return _with(model, vision=tower(eye, model.hidden)) if eye is not None else model


@architecture("Qwen2VLForConditionalGeneration")
def _qwen2_vl(c: Keys, top: Keys) -> Model:
    """qwen2_vl.py"""
    return _seeing(_qwen2(c, top), top, _qwen2_vl_tower)


@architecture("Qwen2_5_VLForConditionalGeneration")
def _qwen25_vl(c: Keys, top: Keys) -> Model:
    """qwen2_5_vl.py"""
    return _seeing(_qwen2(c, top), top, _qwen25_vl_tower)


@architecture("Qwen3VLForConditionalGeneration")
def _qwen3_vl(c: Keys, top: Keys) -> Model:
    """qwen3_vl.py"""
    return _seeing(_qwen3(c, top), top, _qwen3_vl_tower)


@architecture("Qwen3VLMoeForConditionalGeneration")
def _qwen3_vl_moe(c: Keys, top: Keys) -> Model:
    """qwen3_vl_moe.py"""
    return _seeing(_qwen3_moe(c, top), top, _qwen3_vl_tower)


@architecture("Glm4vForConditionalGeneration")
def _glm4v(c: Keys, top: Keys) -> Model:
    """glm4_1v.py: GLM-4-0414 with eyes"""
    bias = c.flag("attention_bias", default=True)
    return _seeing(_dense(c, top, "glm4v", bias=bias, norms=4, rotary=0.5), top, _glm4v_tower)


@architecture("Glm4vMoeForConditionalGeneration")
def _glm4v_moe(c: Keys, top: Keys) -> Model:
    """glm4_1v.py: GLM-4.5-Air with eyes"""
    return _seeing(_glm4_moe(c, top), top, _glm4v_tower)


def _vision_linear(name: str, out: int, inner: int, split: str, bias: bool = True) -> Weight:
    return Weight(f"visual.{name}", out, inner, split, "linear", bias=bias)


def _qwen3_vl_tower(v: Keys, hidden: int) -> Vision:
    """qwen3_vl.py: Qwen3_VisionTransformer"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    depth = v.number("depth")
    merge = v.number("spatial_merge_size")
    patch = v.number("patch_size")
    out = v.number("out_hidden_size", default=hidden)
    deep = v.get("deepstack_visual_indexes", default=[])
    if not isinstance(deep, list):
        raise SizingError(f"{v.where}: deepstack_visual_indexes: a list is wanted, not {deep!r}.")
    weights = [
        Weight(
            "visual.patch_embed",
            h,
            v.number("in_channels", default=3) * v.number("temporal_patch_size") * patch**2,
            bias=True,
        ),
        Weight("visual.pos_embed", v.number("num_position_embeddings"), h),
    ]
    for i in range(depth):
        weights += [
            _vision_linear(f"blocks.{i}.attn.qkv", 3 * h, h, "out"),
            _vision_linear(f"blocks.{i}.attn.proj", h, h, "in"),
            _vision_linear(f"blocks.{i}.mlp.linear_fc1", width, h, "out"),
            _vision_linear(f"blocks.{i}.mlp.linear_fc2", h, width, "in"),
            _norms(f"visual.blocks.{i}", h, 4),
        ]
    wide = h * merge**2
    for i in range(1 + len(deep)):
        weights += [
            _vision_linear(f"merger.{i}.linear_fc1", wide, wide, "out"),
            _vision_linear(f"merger.{i}.linear_fc2", out, wide, "in"),
            Weight(f"visual.merger.{i}.norm", 2 * (h if i == 0 else wide)),
        ]
    return Vision(tuple(weights), h, 2 * width, merge, 16384, levels=1 + len(deep))


def _qwen2_vl_tower(v: Keys, hidden: int) -> Vision:
    """qwen2_vl.py: Qwen2VisionTransformer"""
    h = v.number("embed_dim")
    width = int(h * v.share("mlp_ratio", v.get("mlp_ratio", default=4)))
    merge = v.number("spatial_merge_size", default=2)
    patch = v.number("patch_size", "spatial_patch_size")
    weights = [
        Weight(
            "visual.patch_embed",
            h,
            v.number("in_channels", "in_chans", default=3)
            * v.number("temporal_patch_size", default=2)
            * patch**2,
        ),
    ]
    for i in range(v.number("depth")):
        weights += [
            _vision_linear(f"blocks.{i}.attn.qkv", 3 * h, h, "out"),
            _vision_linear(f"blocks.{i}.attn.proj", h, h, "in"),
            _vision_linear(f"blocks.{i}.mlp.fc1", width, h, "out"),
            _vision_linear(f"blocks.{i}.mlp.fc2", h, width, "in"),
            _norms(f"visual.blocks.{i}", h, 4),
        ]
    wide = h * merge**2
    weights += [
        _vision_linear("merger.mlp.0", wide, wide, "out"),
        _vision_linear("merger.mlp.2", v.number("hidden_size", default=hidden), wide, "in"),
        Weight("visual.merger.ln_q", 2 * h),
    ]
    return Vision(tuple(weights), h, 2 * width, merge, 16384)


def _qwen25_vl_tower(v: Keys, hidden: int) -> Vision:
    """qwen2_5_vl.py: Qwen2_5_VisionTransformer"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    merge = v.number("spatial_merge_size", default=2)
    patch = v.number("patch_size", "spatial_patch_size")
    weights = [
        Weight(
            "visual.patch_embed",
            h,
            v.number("in_channels", "in_chans", default=3)
            * v.number("temporal_patch_size", default=2)
            * patch**2,
        ),
    ]
    for i in range(v.number("depth")):
        weights += [
            _vision_linear(f"blocks.{i}.attn.qkv", 3 * h, h, "out"),
            _vision_linear(f"blocks.{i}.attn.proj", h, h, "in"),
            _vision_linear(f"blocks.{i}.mlp.gate_proj", width, h, "out"),
            _vision_linear(f"blocks.{i}.mlp.up_proj", width, h, "out"),
            _vision_linear(f"blocks.{i}.mlp.down_proj", h, width, "in"),
            _norms(f"visual.blocks.{i}", h, 2),
        ]
    wide = h * merge**2
    weights += [
        _vision_linear("merger.mlp.0", wide, wide, "out"),
        _vision_linear("merger.mlp.2", v.number("out_hidden_size", default=hidden), wide, "in"),
        Weight("visual.merger.ln_q", h),
    ]
    return Vision(tuple(weights), h, 3 * width, merge, 16384)


def _glm4v_tower(v: Keys, hidden: int) -> Vision:
    """glm4_1v.py: Glm4vVisionTransformer"""
    h = v.number("hidden_size")
    out = v.number("out_hidden_size", default=hidden)
    context = v.number("intermediate_size")
    merge = v.number("spatial_merge_size")
    patch = v.number("patch_size")
    weights = [
        Weight(
            "visual.patch_embed",
            h,
            v.number("in_channels", default=3) * v.number("temporal_patch_size") * patch**2,
            bias=True,
        ),
        Weight("visual.embeddings", (v.number("image_size") // patch) ** 2, h),
        Weight("visual.downsample", out, h * merge**2, bias=True),
        _norms("visual", h, 2),
        _vision_linear("merger.proj", out, out, "out", bias=False),
        Weight("visual.merger.norm", 2 * out),
        _vision_linear("merger.gate_proj", context, out, "out", bias=False),
        _vision_linear("merger.up_proj", context, out, "out", bias=False),
        _vision_linear("merger.down_proj", out, context, "in", bias=False),
    ]
    for i in range(v.number("depth")):
        weights += [
            _vision_linear(f"blocks.{i}.attn.qkv", 3 * h, h, "out", bias=False),
            _vision_linear(f"blocks.{i}.attn.proj", h, h, "in", bias=False),
            _vision_linear(f"blocks.{i}.mlp.gate_proj", out, h, "out", bias=False),
            _vision_linear(f"blocks.{i}.mlp.up_proj", out, h, "out", bias=False),
            _vision_linear(f"blocks.{i}.mlp.down_proj", h, out, "in", bias=False),
            _norms(f"visual.blocks.{i}", h, 2),
        ]
    return Vision(tuple(weights), h, 3 * out, merge, 6144)


def _eva_tower(v: Keys, hidden: int, ffn: int) -> Vision:
    """glm4v.py: EVA2CLIPModel"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    patch = v.number("patch_size")
    weights = [
        Weight(
            "vision.patch_embedding", h, v.number("in_channels", default=3) * patch**2, bias=True
        ),
        Weight("vision.position_embedding", v.number("num_positions"), h),
        Weight("vision.conv", hidden, h * 4, bias=True),
        _vision_linear("linear_proj.linear_proj", hidden, hidden, "whole", bias=False),
        _vision_linear("linear_proj.gate_proj", ffn, hidden, "out", bias=False),
        _vision_linear("linear_proj.dense_h_to_4h", ffn, hidden, "out", bias=False),
        _vision_linear("linear_proj.dense_4h_to_h", hidden, ffn, "in", bias=False),
        Weight("vision.linear_proj.norm1", 2 * hidden),
    ]
    for i in range(v.number("num_hidden_layers")):
        weights += [
            _vision_linear(f"layers.{i}.attention.query_key_value", 3 * h, h, "out"),
            _vision_linear(f"layers.{i}.attention.dense", h, h, "in"),
            _vision_linear(f"layers.{i}.mlp.fc1", width, h, "out"),
            _vision_linear(f"layers.{i}.mlp.fc2", h, width, "in"),
            _norms(f"vision.layers.{i}", h, 4),
        ]
    return Vision(tuple(weights), h, 2 * width, 2, 1600)


def _siglip_tower(v: Keys, hidden: int) -> Vision:
    """siglip.py and gemma3_mm.py"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    patch = v.number("patch_size")
    side = v.number("image_size") // patch
    weights = [
        Weight("vision_tower.patch_embedding", h, 3 * patch**2, bias=True),
        Weight("vision_tower.position_embedding", side**2, h),
        Weight("vision_tower.post_layernorm", 2 * h),
        Weight("multi_modal_projector", hidden, h),
        Weight("multi_modal_projector.norm", h),
    ]
    for i in range(v.number("num_hidden_layers")):
        weights += [
            _vision_linear(f"layers.{i}.qkv_proj", 3 * h, h, "out"),
            _vision_linear(f"layers.{i}.out_proj", h, h, "in"),
            _vision_linear(f"layers.{i}.mlp.fc1", width, h, "out"),
            _vision_linear(f"layers.{i}.mlp.fc2", h, width, "in"),
            _norms(f"vision_tower.layers.{i}", h, 4),
        ]
    return Vision(tuple(weights), h, 2 * width, 4, 256)


def _gemma4_tower(v: Keys, hidden: int) -> Vision:
    """gemma4_mm.py: the tower of transformers, whole on every card"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    heads = v.number("num_attention_heads")
    kv = v.number("num_key_value_heads", default=heads)
    head = v.number("head_dim", default=h // heads)
    weights = [
        Weight("vision_tower.patch_embedder", h, 3 * v.number("patch_size") ** 2),
        Weight("vision_tower.position_embedding_table", 2 * v.number("position_embedding_size"), h),
        Weight("vision_tower.std", 2 * h),
        Weight("embed_vision", hidden, h),
    ]
    for i in range(v.number("num_hidden_layers")):
        p = f"vision_tower.layers.{i}"
        weights += [
            Weight(f"{p}.attn", (2 * heads + 2 * kv) * head, h),
            Weight(f"{p}.mlp", 3 * width, h),
            Weight(f"{p}.norms", 4 * h + 2 * head),
        ]
    return Vision(
        tuple(weights),
        h,
        3 * width,
        v.number("pooling_kernel_size", default=3),
        v.number("default_output_length", default=280),
        split=False,
    )
