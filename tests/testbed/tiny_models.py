"""Makes tiny models with random weights on the spot: GLM-4 and Qwen3, as vLLM loads them.

    python -m tests.testbed.tiny_models DIR [--kind glm4|qwen3] [--size tiny|small] [--pad-mib N]

A vocabulary of 1024, bfloat16, three shards with an index, a byte-level BPE tokenizer trained
here, a chat template, a generation config. Answers are nonsense that streams: the weights are
random, and the same for the same seed. Standard library alone, so that it runs on any machine,
in well under a second for a tiny one. A small one is large enough to compute for as long on a
core as large models do on a card; its weights take some seconds to make.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["glm4", "qwen3"]
KINDS: tuple[Kind, ...] = ("glm4", "qwen3")

VOCABULARY = 1024
CONTEXT = 8192
PAD_ROWS = 1 << 10  # rows of a padding tensor, 1 KiB each in bfloat16

TEXT = (
    "The model answers one question after another, and every answer is made of tokens. "
    "A server reads the request, looks for a free card and streams what it finds. "
    "Small words come often: the, and, of, to, in, is, that, for, it, with, as, was, on, are. "
    "When a host restarts, its instances warm up before they take the next request. "
    "Weather, music, letters, numbers, rivers, mountains, cities and people are things to ask "
    "about; yesterday, today and tomorrow are days. Why, how, when, where, who and what begin "
    "questions. Hello, thank you, please, yes and no are said between friends. "
    "一个模型回答一个又一个问题，每个回答都由词元组成。服务器读取请求，找到空闲的卡，然后返回结果。"
    "你好，谢谢，今天天气很好，明天我们去城市里看音乐会。为什么，怎么样，什么时候，在哪里，谁。"
)
PIECES = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+")  # close to the GPT-2 split of ByteLevel


@dataclass(frozen=True)
class Size:
    """What grows with a model; the names are those of config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SIZES = {
    "tiny": Size(64, 128, 2, 4, 2, 32),  # 32 is the least head size of vLLM's CPU attention
    "small": Size(1024, 3072, 16, 16, 8, 64),  # some 200 million weights
}
TINY = SIZES["tiny"]


@dataclass(frozen=True)
class _Family:
    """What differs between the two architectures."""

    architecture: str
    model_type: str
    special: tuple[str, ...]  # special tokens; the first ends an answer
    template: str
    template_file: bool  # chat_template.jinja, else in tokenizer_config.json
    config: dict[str, Any]


FAMILIES: dict[Kind, _Family] = {
    "glm4": _Family(
        "Glm4ForCausalLM",
        "glm4",
        ("<|user|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>",
         "<|observation|>"),
        "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        True,
        {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        "qwen3",
        ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        False,
        {"attention_bias": False, "rope_theta": 1000000.0, "sliding_window": None,
         "use_sliding_window": False},
    ),
}  # fmt: skip


def make(
    directory: Path,
    kind: Kind,
    *,
    size: Size = TINY,
    seed: int = 1,
    shards: int = 3,
    pad_mib: int = 0,
) -> Path:
    """Write a model into a directory (made when missing). Returns the directory.

    ``pad_mib`` adds that much to the shards, as tensors of a further layer that neither
    architecture loads: for downloads that shall take a while, not for serving.
    """
    family = FAMILIES[kind]
    directory.mkdir(parents=True, exist_ok=True)
    _write_weights(directory, tensors(kind, size), random.Random(f"{kind}-{seed}"), shards, pad_mib)
    _write_tokenizer(directory, family)
    end = list(range(VOCABULARY - len(family.special), VOCABULARY))[:2]
    _json(
        directory / "config.json",
        {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "hidden_size": size.hidden,
            "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "eos_token_id": end,
            "pad_token_id": end[1],
            "use_cache": True,
            "torch_dtype": "bfloat16",
            **family.config,
        },
    )
    _json(directory / "generation_config.json", {"eos_token_id": end, "pad_token_id": end[1]})
    return directory


def make_adapter(directory: Path, kind: Kind, *, rank: int = 8, seed: int = 1) -> Path:
    """Write a LoRA adapter for a tiny model of this kind, strong enough to change every answer."""
    directory.mkdir(parents=True, exist_ok=True)
    modules = ("q_proj", "v_proj")
    shapes = {name: shape for name, (shape, _) in tensors(kind, TINY).items()}
    wanted: dict[str, tuple[tuple[int, ...], str]] = {}
    for layer in range(TINY.layers):
        for module in modules:
            at = f"model.layers.{layer}.self_attn.{module}"
            rows, columns = shapes[f"{at}.weight"]
            wanted[f"base_model.model.{at}.lora_A.weight"] = (rank, columns), "head"
            wanted[f"base_model.model.{at}.lora_B.weight"] = (rows, rank), "head"
    _write_safetensors(
        directory / "adapter_model.safetensors", wanted, list(wanted), random.Random(f"lora-{seed}")
    )
    _json(
        directory / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 8 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(modules),
            "base_model_name_or_path": kind,
        },
    )
    return directory


def tensors(kind: Kind, size: Size) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of an architecture: name to (shape, "norm" | "bias" | "head" | "weight")."""
    wide, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "model.embed_tokens.weight": ((VOCABULARY, size.hidden), "weight")
    }
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            found[f"{at}.self_attn.{name}_proj.weight"] = ((rows, size.hidden), "weight")
            if kind == "glm4":
                found[f"{at}.self_attn.{name}_proj.bias"] = ((rows,), "bias")
        found[f"{at}.self_attn.o_proj.weight"] = ((size.hidden, wide), "weight")
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind == "glm4":
            norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
            found[f"{at}.mlp.gate_up_proj.weight"] = (
                (2 * size.intermediate, size.hidden),
                "weight",
            )
        else:
            for name in ("q_norm", "k_norm"):
                found[f"{at}.self_attn.{name}.weight"] = ((size.head_dim,), "norm")
            for name in ("gate_proj", "up_proj"):
                found[f"{at}.mlp.{name}.weight"] = ((size.intermediate, size.hidden), "weight")
        found[f"{at}.mlp.down_proj.weight"] = ((size.hidden, size.intermediate), "weight")
        for norm in norms:
            found[f"{at}.{norm}.weight"] = ((size.hidden,), "norm")
    found["model.norm.weight"] = ((size.hidden,), "norm")
    found["lm_head.weight"] = ((VOCABULARY, size.hidden), "head")
    return found


def _write_weights(
    directory: Path,
    wanted: dict[str, tuple[tuple[int, ...], str]],
    rng: random.Random,
    shards: int,
    pad_mib: int,
) -> None:
    names = list(wanted)
    per_shard = -(-len(names) // shards)
    padding = [f"padding.{number}" for number in range(pad_mib)]
    wanted = wanted | dict.fromkeys(padding, ((PAD_ROWS, 512), "weight"))
    where: dict[str, str] = {}
    total = 0
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[number * per_shard : (number + 1) * per_shard] + padding[number::shards]
        total += _write_safetensors(directory / name, wanted, chosen, rng)
        where |= dict.fromkeys(chosen, name)
    _json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": where},
    )


def _write_safetensors(
    path: Path,
    wanted: dict[str, tuple[tuple[int, ...], str]],
    chosen: list[str],
    rng: random.Random,
) -> int:
    """Write some of the tensors as one file; the bytes of their data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in chosen:
        shape = wanted[tensor][0]
        size = 2 * _count(shape)
        header[tensor] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in chosen:
            shape, what = wanted[tensor]
            file.write(_bfloat16(rng, _count(shape), what))
    return offset


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _bfloat16(rng: random.Random, count: int, what: str) -> bytes:
    """Little-endian bfloat16: 1 for norms, 0 for biases, else random within one power of two.

    The exponent is fixed and sign and mantissa are random bits, which is quick to make:
    0.0156 to 0.0313 for weights, eight times as much for the head so that answers vary.
    """
    if what == "norm":
        return b"\x80\x3f" * count
    if what == "bias":
        return b"\x00\x00" * count
    high = 0x3E if what == "head" else 0x3C
    data = bytearray(rng.randbytes(2 * count))
    data[0::2] = data[0::2].translate(bytes((value & 0x7F) | 0x80 for value in range(256)))
    data[1::2] = data[1::2].translate(bytes((value & 0x80) | high for value in range(256)))
    return bytes(data)


def _write_tokenizer(directory: Path, family: _Family) -> None:
    vocabulary, merges = _train(VOCABULARY - len(family.special))
    specials = [
        {"id": len(vocabulary) + number, "content": text, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True}
        for number, text in enumerate(family.special)
    ]  # fmt: skip
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    _json(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": specials,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocabulary,
                "merges": [" ".join(pair) for pair in merges],
            },
        },
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": family.special[0],
        "pad_token": family.special[1],
        "additional_special_tokens": list(family.special[2:]),
    }
    if family.template_file:
        (directory / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    else:
        config["chat_template"] = family.template
    _json(directory / "tokenizer_config.json", config)


@functools.cache
def _train(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of byte-level BPE over TEXT: the most frequent pair, again and again.

    TEXT yields fewer merges than wanted; the rest of the vocabulary is filled with pairs of
    letters, whose merges are valid although no training asked for them.
    """
    alphabet = _byte_alphabet()
    words = Counter(
        tuple(alphabet[byte] for byte in piece.encode()) for piece in PIECES.findall(TEXT)
    )
    tokens = sorted(alphabet.values())
    merges: list[tuple[str, str]] = []
    while len(tokens) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        tokens.append("".join(best))
        words = Counter({_merge(word, best): count for word, count in words.items()})
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = set(tokens)
    for first in letters:
        for second in letters:
            if len(tokens) < size and first + second not in known:
                merges.append((first, second))
                tokens.append(first + second)
    return {token: number for number, token in enumerate(tokens)}, merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def _byte_alphabet() -> dict[int, str]:
    """A printable character for every byte, as GPT-2 and ByteLevel map them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + number) for number, byte in enumerate(rest)
    }


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="qwen3")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pad-mib", type=int, default=0, help="make the shards larger")
    options = parser.parse_args()
    size = SIZES[options.size]
    make(options.directory, options.kind, size=size, seed=options.seed, pad_mib=options.pad_mib)
    written = sum(path.stat().st_size for path in options.directory.iterdir())
    print(f"{options.directory}: {options.kind}, {written / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
