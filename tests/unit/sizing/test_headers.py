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
