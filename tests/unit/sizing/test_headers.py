"""safetensors headers and the index."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.sizing import SizingError, find_gpu, size
from vllm_fleet.sizing.headers import read_header, stored_weights

Config = Callable[..., dict[str, Any]]


def write(file: Path, tensors: dict[str, int], dtype: str = "BF16") -> None:
    """A file with a header only; ``tensors``: bytes of each."""
    header, at = {}, 0
    for name, length in tensors.items():
        header[name] = {"dtype": dtype, "shape": [length // 2], "data_offsets": [at, at + length]}
        at += length
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_shards_of_the_index_are_summed(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", {"a": 100, "b": 50})
    write(tmp_path / "model-2.safetensors", {"c": 25, "mtp.fc.weight": 5})
    write(tmp_path / "consolidated.safetensors", {"all": 1000})
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "metadata": {"total_size": 0},
                "weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"},
            }
        )
    )
    found = stored_weights(tmp_path)
    assert found is not None
    assert (found.bytes, found.tensors, found.has_draft) == (180, 4, True)
    assert "total_size 0" in found.warnings[0]


def test_no_weights_yet(tmp_path: Path) -> None:
    assert stored_weights(tmp_path) is None


def test_missing_shard(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", {"a": 100})
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(SizingError, match=r"1 of 2 shards are missing, the first is model-2"):
        stored_weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"abc", "too short"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (struct.pack("<Q", 1 << 60) + b"x", "no safetensors file"),
        (struct.pack("<Q", 2) + b"{]", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(SizingError, match=text):
        read_header(file)


def test_tensor_without_offsets(tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "BF16"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(SizingError, match="tensor a"):
        stored_weights(tmp_path)


def test_offsets_that_are_no_numbers(tmp_path: Path) -> None:
    text = b'{"a": {"dtype": "BF16", "data_offsets": [0, Infinity]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(SizingError, match="tensor a"):
        stored_weights(tmp_path)


def test_an_index_without_its_shards_is_said(tmp_path: Path, config: Config) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": {"a": "model-1.safetensors"}})
    )
    found = size(config("qwen3-0.6b"), gpu=find_gpu("L4"), weights_dir=tmp_path)
    assert any("no safetensors in" in w for w in found.warnings)


def test_weights_for_pooling_are_without_a_head(tmp_path: Path, config: Config) -> None:
    """adapters.py leaves it out; the checkpoint may hold one or not."""
    data, card = config("qwen3-8b"), find_gpu("H100")
    head = 151936 * 4096 * 2
    whole = size(data, gpu=card)
    pooled = size(data, gpu=card, pooling=True)
    assert (whole.weights_gib - pooled.weights_gib) * 2**30 == pytest.approx(head, rel=0.001)
    body = 8_190_735_360 * 2 - head
    for tensors in ({"layers": body}, {"layers": body, "lm_head.weight": head}):
        write(tmp_path / "model.safetensors", tensors)
        found = size(data, gpu=card, pooling=True, weights_dir=tmp_path)
        assert found.weights_gib == pooled.weights_gib


def test_sizes_on_disk_win_over_the_config(tmp_path: Path, config: Config) -> None:
    data = config("qwen3-0.6b")
    plain = size(data, gpu=find_gpu("L4"))
    exact = 596_049_920 * 2
    write(tmp_path / "model.safetensors", {"w": exact})
    same = size(data, gpu=find_gpu("L4"), weights_dir=tmp_path)
    assert same.weights_gib == plain.weights_gib
    write(tmp_path / "model.safetensors", {"w": exact * 6 // 10})
    other = size(data, gpu=find_gpu("L4"), weights_dir=tmp_path)
    assert other.weights_gib == pytest.approx(plain.weights_gib * 0.6, rel=0.01)
    assert any("-40.0% of what config.json says" in w for w in other.warnings)
