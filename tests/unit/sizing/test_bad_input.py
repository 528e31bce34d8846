"""What cannot be sized gets a sentence, never a traceback or a guess."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.sizing import SizingError, find_gpu, load_config, size

Config = Callable[..., dict[str, Any]]
H100 = find_gpu("H100")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": None}, "key 'num_hidden_layers' is missing"),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"vocab_size": "many"}, "vocab_size: 'many' is not a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a whole number of 1"),
        ({"intermediate_size": True}, "intermediate_size: True is not a whole number"),
        ({"max_position_embeddings": None}, "key 'max_position_embeddings' .*is missing"),
        ({"architectures": ["FancyForCausalLM"]}, "nor does any version from 0.18.0 to"),
        ({"architectures": ["KimiLinearForCausalLM"]}, "KDA layers are not sized yet"),
        ({"architectures": ["Glm5NextForCausalLM"]}, "first version with it is 0.30.0"),
        ({"architectures": "Qwen3ForCausalLM"}, "a list of names is wanted"),
        ({"architectures": None, "model_type": None}, "this is no config.json"),
        ({"architectures": None, "model_type": "fancy"}, "model_type 'fancy' is not known"),
        ({"head_dim": None, "num_attention_heads": 7}, "is not a multiple of"),
        ({"use_sliding_window": "yes"}, "neither true nor false"),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 4},
            "some but not all layers",
        ),
    ],
)
def test_configs(config: Config, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SizingError, match=text):
        size(config("qwen3-8b", **changes), gpu=H100)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-8b",
        "glm-5.1-fp8",
        "gpt-oss-20b",
        "gemma-3-12b-text",
        "qwen3.6-35b-a3b-nvfp4",
        "deepseek-v2-lite",
    ],
)
@pytest.mark.parametrize("bad", ["x", 0, -1, 1.5, [1], {"a": 1}, True])
def test_any_spoilt_key_is_a_sentence(config: Config, name: str, bad: Any) -> None:
    data = config(name)
    sentences = []
    for key in data:
        try:
            size({**data, key: bad}, gpu=H100, max_model_len=4096)
        except SizingError as error:
            sentences.append(str(error))
    assert sentences
    assert all(" " in s for s in sentences)


def test_unknown_kind_of_layer(config: Config) -> None:
    data = config("qwen3.5-27b")
    data["text_config"] = {**data["text_config"], "layer_types": ["mystery_attention"] * 64}
    with pytest.raises(SizingError, match="'mystery_attention' is a kind of layer"):
        size(data, gpu=H100)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -1.0])
def test_shares_that_are_no_numbers(config: Config, bad: float) -> None:
    yarn = {"rope_type": "yarn", "factor": bad, "original_max_position_embeddings": 4096}
    with pytest.raises(SizingError, match=r"factor: .* is not a number above 0"):
        size(config("glm-5.1-fp8", rope_parameters=yarn), gpu=H100)
    with pytest.raises(SizingError, match=r"partial_rotary_factor: .* is not a number above 0"):
        size(config("glm-4-9b-0414", partial_rotary_factor=bad), gpu=H100)


def test_too_few_layer_types(config: Config) -> None:
    data = config("gpt-oss-20b")
    found = size(data, gpu=H100)
    assert found.fits
    gemma = config("gemma-4-26b-a4b")
    gemma["text_config"] = {**gemma["text_config"], "layer_types": ["full_attention"]}
    with pytest.raises(SizingError, match="layer_types has 1 entries for 30 layers"):
        size(gemma, gpu=H100)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"gpu_memory_utilization": 1.5}, "a share of the card above 0 up to 1"),
        ({"kv_cache_dtype": "fp7"}, "'fp7' is not sized here"),
        ({"dtype": "int3"}, "dtype 'int3' is not known"),
        ({"vllm_version": "latest"}, "is not a version"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 64}, "vLLM refuses"),
        ({"tp": 0}, "tp: 0 is less than 1"),
        ({"speculative_tokens": 2}, "no MTP layer"),
        ({"quantization": "awq"}, "only fp8 is made while loading"),
    ],
)
def test_settings(config: Config, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SizingError, match=text):
        size(config("qwen3-8b"), gpu=H100, **settings)


def test_architecture_newer_than_the_version(config: Config) -> None:
    with pytest.raises(SizingError, match=r"first version with it is 0\.19\.0"):
        size(config("gemma-4-26b-a4b"), gpu=H100, vllm_version="0.18.0")
    text = config("qwen3-8b", architectures=["Qwen3_5ForCausalLM"])
    with pytest.raises(SizingError, match=r"first version with it is 0\.27\.0"):
        size(text, gpu=H100, vllm_version="0.26.0")
    gone = config("meta-llama-3.1-8b", architectures=["AquilaForCausalLM"])
    with pytest.raises(SizingError, match=r"0\.24\.0 was the last version with it"):
        size(gone, gpu=H100, vllm_version="0.25.0")


def test_architecture_made_of_another_for_pooling(config: Config) -> None:
    plain = size(config("qwen3-8b"), gpu=H100, pooling=True)
    for name in ("Qwen3ForSequenceClassification", "Qwen3Model", "Qwen3ForTokenClassification"):
        found = size(config("qwen3-8b", architectures=[name]), gpu=H100)
        assert found.activation_gib == plain.activation_gib


def test_class_defaults_are_said(config: Config) -> None:
    data = config("gemma-3-12b-text", head_dim=None)
    assert any("absent in config.json: head_dim" in w for w in size(data, gpu=H100).warnings)


def test_versions_outside_use_the_nearest_rules_and_say_so(config: Config) -> None:
    found = size(config("qwen3-8b"), gpu=H100, vllm_version="0.40.0")
    assert any("outside 0.18 to 0.33" in w for w in found.warnings)
    assert found.settings["model_runner"] == "v2"


def test_unknown_cards() -> None:
    with pytest.raises(SizingError, match="this card is not in the table"):
        find_gpu("Voodoo 3")
    with pytest.raises(SizingError, match="no memory size"):
        find_gpu("0.2")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(SizingError, match="does not exist"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(SizingError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SizingError, match="GGUF weights are not sized"):
        load_config(tmp_path)
    with pytest.raises(SizingError, match="GGUF weights are not sized"):
        load_config(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SizingError, match="not readable as JSON"):
        load_config(tmp_path)
    for text in ("[" * 5000, '{"hidden_size": ' + "1" * 5000 + "}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SizingError, match="not readable as JSON"):
            load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SizingError, match="a JSON object is wanted"):
        load_config(tmp_path)


def test_quantisation_beside_the_config(tmp_path: Path, config: Config) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-8b")))
    plain = size(load_config(tmp_path)[0], gpu=H100)
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(
            {
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": "FP8",
                    "exclude_modules": ["lm_head"],
                }
            }
        )
    )
    packed = size(load_config(tmp_path)[0], gpu=find_gpu("B200"))
    assert packed.weights_gib < plain.weights_gib / 2
    assert packed.kv_bytes_per_token == plain.kv_bytes_per_token / 2
