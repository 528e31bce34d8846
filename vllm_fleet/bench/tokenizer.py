"""A tokenizer that stands in where the model's own is not at hand: one byte, one token.

GuideLLM cuts its English text to a number of tokens of some tokenizer. With this one a prompt of
so many bytes comes out; tokenizers of today make about one token of five and a half bytes of
such text. What the engine counted is in the report either way.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from vllm_fleet.bench.load import Length, Load

BYTES_PER_TOKEN = 5.5  # English text, Qwen3 and GLM-4.5 tokenizers


def write(folder: Path) -> str:
    """Write it into a folder; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: number for number, letter in enumerate(_letters())}
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": bytes_,
                "post_processor": None,
                "decoder": bytes_,
                "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**9})
    )
    return str(folder)


def stretched(load: Load) -> Load:
    """The load with lengths in bytes, for this tokenizer. Lengths of answers are the engine's."""

    def longer(tokens: int) -> int:
        return round(tokens * BYTES_PER_TOKEN)

    return replace(
        load,
        input=Length(longer(load.input.tokens), longer(load.input.spread)),
        prefix_tokens=longer(load.prefix_tokens),
    )


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: itself where it can be printed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]
