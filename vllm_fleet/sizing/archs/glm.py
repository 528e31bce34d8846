"""GLM: ChatGLM, GLM-4, GLM-4.5 and later, and those with eyes.

GLM-4.7-Flash and GLM-5 are laid out as DeepSeek: deepseek.py.
"""

from __future__ import annotations

from ..arch import Model
from ..reader import Keys
from .decoder import Experts, Heads, decoder, dense, gated_mlp
from .parts import rotary, rotary_positions, rotary_width
from .vision import eva_tower, glm4v_tower, seeing


def glm(c: Keys, top: Keys) -> Model:
    """glm.py: llama with q, k, v biases and half of each head rotated"""
    bias = c.flag("attention_bias", default=True)
    return dense(c, top, "glm", bias=bias, rotary_share=0.5)


def glm4(c: Keys, top: Keys) -> Model:
    """glm4.py: two more norms a layer"""
    bias = c.flag("attention_bias", default=False)
    return dense(c, top, "glm4", bias=bias, norms_each=4, rotary_share=0.5)


def glm4v(c: Keys, top: Keys) -> Model:
    """glm4_1v.py: GLM-4-0414 with eyes"""
    bias = c.flag("attention_bias", default=True)
    model = dense(c, top, "glm4v", bias=bias, norms_each=4, rotary_share=0.5)
    return seeing(model, top, glm4v_tower)


def chatglm(c: Keys, top: Keys) -> Model:
    """chatglm.py, glm4v.py: its own names for everything"""
    heads = c.number("num_attention_heads")
    hidden = c.number("hidden_size")
    head = c.number("kv_channels", default=hidden // heads)
    grouped = c.flag("multi_query_attention", default=False)
    kv = c.number("multi_query_group_num") if grouped else heads
    width = c.number("ffn_hidden_size")
    positions = c.number("seq_length", "max_position_embeddings")
    bias = c.flag("add_bias_linear", default=False)
    qkv_bias = bias or c.flag("add_qkv_bias", default=False)
    a = Heads(heads, kv, head, hidden, bias=qkv_bias, out_bias=bias)
    eye = c.inner("vision_config") or top.inner("vision_config")
    return decoder(
        c,
        top,
        "chatglm",
        hidden=hidden,
        heads=heads,
        mixer=lambda i, p: a.mixer(f"{p}.self_attention"),
        mlp=lambda i, p: gated_mlp(f"{p}.mlp", hidden, width, bias=bias),
        rotary=[rotary(positions, head // 2)],
        divide=[("MLP width", width)],
        count=c.number("num_layers", "num_hidden_layers"),
        vocab=c.number("padded_vocab_size", "vocab_size"),
        positions=positions,
        prefix="transformer",
        layers="transformer.encoder.layers",
        embedding="embedding",
        head="transformer.output_layer",
        vision=eva_tower(eye, hidden, width) if eye is not None else None,
    )


def glm4_moe(c: Keys, top: Keys) -> Model:
    """glm4_moe.py: first layers dense, fp32 gate, one shared expert"""
    bias = c.flag("attention_bias", default=False)
    a = Heads.read(c, bias=bias, qk_norm=c.flag("use_qk_norm", default=False))
    expert_width = c.number("moe_intermediate_size")
    experts = Experts(
        a.hidden,
        count=c.number("n_routed_experts"),
        top_k=c.number("num_experts_per_tok"),
        width=expert_width,
        shared_width=c.number("n_shared_experts", default=0, least=0) * expert_width,
        gate_element=4,
        correction=True,
    )
    width = c.number("intermediate_size")
    first = c.number("first_k_dense_replace", default=0, least=0)
    return decoder(
        c,
        top,
        "glm4_moe",
        hidden=a.hidden,
        heads=a.heads,
        mixer=lambda i, p: a.mixer(f"{p}.self_attn"),
        mlp=lambda i, p: experts.mlp(f"{p}.mlp", routed=i >= first, width=width),
        rotary=[rotary(rotary_positions(c), rotary_width(c, a.head, 0.5))],
        divide=[("expert width", expert_width), ("MLP width", width)],
        mtp=True,
    )


def glm4v_moe(c: Keys, top: Keys) -> Model:
    """glm4_1v.py: GLM-4.5-Air with eyes"""
    return seeing(glm4_moe(c, top), top, glm4v_tower)
