"""Vision towers. Each follows the file of vllm/model_executor/models named in its docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..arch import Model, Vision, Weight
from ..errors import SizingError
from ..reader import Keys
from .parts import norms

#: From a vision_config and the width of the language model.
Tower = Callable[[Keys, int], Vision]


def seeing(model: Model, top: Keys, tower: Tower) -> Model:
    """The model with its tower, where the config has one."""
    eye = top.inner("vision_config")
    return model if eye is None else replace(model, vision=tower(eye, model.hidden))


def linear(name: str, out: int, inner: int, split: str, bias: bool = True) -> Weight:
    """A linear layer of a tower."""
    return Weight(f"visual.{name}", out, inner, split, "linear", bias=bias)


def block(
    prefix: str,
    hidden: int,
    width: int,
    *,
    qkv: str = "attn.qkv",
    proj: str = "attn.proj",
    up: str = "mlp.fc1",
    down: str = "mlp.fc2",
    normed: str = "visual",
) -> list[Weight]:
    """Attention and an MLP, two norms with biases."""
    return [
        linear(f"{prefix}.{qkv}", 3 * hidden, hidden, "out"),
        linear(f"{prefix}.{proj}", hidden, hidden, "in"),
        linear(f"{prefix}.{up}", width, hidden, "out"),
        linear(f"{prefix}.{down}", hidden, width, "in"),
        norms(f"{normed}.{prefix}", hidden, 4),
    ]


def gated_block(prefix: str, hidden: int, width: int, *, bias: bool) -> list[Weight]:
    """Attention and a gated MLP, two norms without biases."""
    return [
        linear(f"{prefix}.attn.qkv", 3 * hidden, hidden, "out", bias),
        linear(f"{prefix}.attn.proj", hidden, hidden, "in", bias),
        linear(f"{prefix}.mlp.gate_proj", width, hidden, "out", bias),
        linear(f"{prefix}.mlp.up_proj", width, hidden, "out", bias),
        linear(f"{prefix}.mlp.down_proj", hidden, width, "in", bias),
        norms(f"visual.{prefix}", hidden, 2),
    ]


# Qwen


def qwen3_vl_tower(v: Keys, hidden: int) -> Vision:
    """qwen3_vl.py: Qwen3_VisionTransformer"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    depth = v.number("depth")
    merge = v.number("spatial_merge_size")
    patch_embed = _patches(v, h)
    out = v.number("out_hidden_size", default=hidden)
    deep = v.get("deepstack_visual_indexes", default=[])
    if not isinstance(deep, list):
        raise SizingError(f"{v.where}: deepstack_visual_indexes: a list is wanted, not {deep!r}.")
    weights = [patch_embed, Weight("visual.pos_embed", v.number("num_position_embeddings"), h)]
    for i in range(depth):
        weights += block(f"blocks.{i}", h, width, up="mlp.linear_fc1", down="mlp.linear_fc2")
    wide = h * merge**2
    for i in range(1 + len(deep)):
        weights += [
            linear(f"merger.{i}.linear_fc1", wide, wide, "out"),
            linear(f"merger.{i}.linear_fc2", out, wide, "in"),
            Weight(f"visual.merger.{i}.norm", 2 * (h if i == 0 else wide)),
        ]
    return Vision(tuple(weights), h, 2 * width, merge, 16384, levels=1 + len(deep))


def qwen2_vl_tower(v: Keys, hidden: int) -> Vision:
    """qwen2_vl.py: Qwen2VisionTransformer"""
    h = v.number("embed_dim")
    width = int(h * v.share("mlp_ratio", v.get("mlp_ratio", default=4)))
    merge, weights = _qwen2_ends(v, h, v.number("hidden_size", default=hidden), norm=2 * h)
    for i in range(v.number("depth")):
        weights += block(f"blocks.{i}", h, width)
    return Vision(tuple(weights), h, 2 * width, merge, 16384)


def qwen2_5_vl_tower(v: Keys, hidden: int) -> Vision:
    """qwen2_5_vl.py: Qwen2_5_VisionTransformer"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    merge, weights = _qwen2_ends(v, h, v.number("out_hidden_size", default=hidden), norm=h)
    for i in range(v.number("depth")):
        weights += gated_block(f"blocks.{i}", h, width, bias=True)
    return Vision(tuple(weights), h, 3 * width, merge, 16384)


def _qwen2_ends(v: Keys, h: int, out: int, *, norm: int) -> tuple[int, list[Weight]]:
    """spatial_merge_size, and the first and last weights of the towers of Qwen2-VL and 2.5."""
    merge = v.number("spatial_merge_size", default=2)
    patch = v.number("patch_size", "spatial_patch_size")
    channels = v.number("in_channels", "in_chans", default=3)
    wide = h * merge**2
    return merge, [
        Weight(
            "visual.patch_embed",
            h,
            channels * v.number("temporal_patch_size", default=2) * patch**2,
        ),
        linear("merger.mlp.0", wide, wide, "out"),
        linear("merger.mlp.2", out, wide, "in"),
        Weight("visual.merger.ln_q", norm),
    ]


def _patches(v: Keys, h: int) -> Weight:
    """The patch embedding of Qwen3-VL and GLM-4.1V: a 3D convolution with biases."""
    patch = v.number("patch_size")
    volume = v.number("in_channels", default=3) * v.number("temporal_patch_size") * patch**2
    return Weight("visual.patch_embed", h, volume, bias=True)


# GLM


def glm4v_tower(v: Keys, hidden: int) -> Vision:
    """glm4_1v.py: Glm4vVisionTransformer"""
    h = v.number("hidden_size")
    out = v.number("out_hidden_size", default=hidden)
    context = v.number("intermediate_size")
    merge = v.number("spatial_merge_size")
    weights = [
        _patches(v, h),
        Weight("visual.embeddings", (v.number("image_size") // v.number("patch_size")) ** 2, h),
        Weight("visual.downsample", out, h * merge**2, bias=True),
        norms("visual", h, 2),
        linear("merger.proj", out, out, "out", bias=False),
        Weight("visual.merger.norm", 2 * out),
        linear("merger.gate_proj", context, out, "out", bias=False),
        linear("merger.up_proj", context, out, "out", bias=False),
        linear("merger.down_proj", out, context, "in", bias=False),
    ]
    for i in range(v.number("depth")):
        weights += gated_block(f"blocks.{i}", h, out, bias=False)
    return Vision(tuple(weights), h, 3 * out, merge, 6144)


def eva_tower(v: Keys, hidden: int, ffn: int) -> Vision:
    """glm4v.py: EVA2CLIPModel; ``ffn``: width of the language model's MLP"""
    h = v.number("hidden_size")
    width = v.number("intermediate_size")
    patch = v.number("patch_size")
    weights = [
        Weight(
            "vision.patch_embedding", h, v.number("in_channels", default=3) * patch**2, bias=True
        ),
        Weight("vision.position_embedding", v.number("num_positions"), h),
        Weight("vision.conv", hidden, h * 4, bias=True),
        linear("linear_proj.linear_proj", hidden, hidden, "whole", bias=False),
        linear("linear_proj.gate_proj", ffn, hidden, "out", bias=False),
        linear("linear_proj.dense_h_to_4h", ffn, hidden, "out", bias=False),
        linear("linear_proj.dense_4h_to_h", hidden, ffn, "in", bias=False),
        Weight("vision.linear_proj.norm1", 2 * hidden),
    ]
    for i in range(v.number("num_hidden_layers")):
        weights += block(
            f"layers.{i}",
            h,
            width,
            qkv="attention.query_key_value",
            proj="attention.dense",
            normed="vision",
        )
    return Vision(tuple(weights), h, 2 * width, 2, 1600)


# Gemma


def siglip_tower(v: Keys, hidden: int) -> Vision:
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
        weights += block(
            f"layers.{i}", h, width, qkv="qkv_proj", proj="out_proj", normed="vision_tower"
        )
    return Vision(tuple(weights), h, 2 * width, 4, 256)


def gemma4_tower(v: Keys, hidden: int) -> Vision:
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
