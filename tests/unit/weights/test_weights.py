"""Which weights a model wants, and what is refused about them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed import tiny_models
from vllm_fleet import engine_data, weights
from vllm_fleet.onhost import structure
from vllm_fleet.onhost import weights as onhost
from vllm_fleet.onhost.tools import Refusal
from vllm_fleet.onhost.weights import Entry
from vllm_fleet.spec.model import HostSettings, Model

NEEDS = ["tokenizer", "chat_template"]
A = "a" * 64
SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("revision", ["master", "v1.0", "0a" * 20, "release_1-2"])
def test_plain_revisions_are_their_own_directory(revision: str) -> None:
    assert weights.path_safe(revision) == revision


@pytest.mark.parametrize(
    "revision", ["refs/pr/1", "../../etc", ".hidden", "a b", "版本", "x" * 300]
)
def test_other_revisions_become_one_safe_directory_name(revision: str) -> None:
    name = weights.path_safe(revision)
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name) < 200
    assert name != weights.path_safe(revision + "-")


def test_a_model_wants_its_directory_and_checks() -> None:
    chat = weights.wanted("air", Model(repo="Z/Air", revision="v1.0"))
    assert chat.directory == "/opt/vllm/models/air/v1.0"
    assert chat.stamp == "/opt/vllm/models/air/v1.0/.verified.json"
    assert weights.needs(chat) == ("tokenizer", "chat_template")
    own = weights.wanted("own", Model(source="path", repo="/data/own", task="embed"))
    assert (own.directory, own.stamp) == ("/data/own", "/var/lib/vllm/weights/own.json")
    assert weights.needs(own) == ("tokenizer",)
    given = Model(repo="Z/Air", vllm_args={"chat_template": "/x.jinja"})
    assert weights.needs(weights.wanted("air", given)) == ("tokenizer",)
    elsewhere = Model(repo="Z/Air", vllm_args={"tokenizer": "/data/tokenizer"})
    assert weights.needs(weights.wanted("air", elsewhere)) == ()


def test_code_from_a_repository_needs_a_commit() -> None:
    moving = Model(repo="Z/Air", revision="v1.0", trust_remote_code=True)
    order = weights.order("air", moving, HostSettings())
    with pytest.raises(Refusal, match="commit"):
        onhost.fetch({**order, "directory": "/nowhere/air/v1.0"})


def test_a_stamp_counts_only_for_what_was_checked() -> None:
    wanted = weights.wanted("air", Model(repo="Z/Air", revision="v1.0"))
    stamp = {**wanted.identity, "passed": NEEDS, "changed": []}
    assert weights.verified(stamp, wanted)
    assert not weights.verified(None, wanted)
    assert not weights.verified({**stamp, "revision": "v2"}, wanted)
    assert not weights.verified({**stamp, "passed": ["tokenizer"]}, wanted)
    assert not weights.verified({**stamp, "changed": ["config.json"]}, wanted)


def test_copies_in_other_formats_are_not_fetched() -> None:
    paths = [
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "config.json",
        "original/consolidated.00.pth", "consolidated.safetensors", "model.gguf", "sub/code.py",
    ]  # fmt: skip
    entries, warnings = onhost.wanted("m", [Entry(path, 1, A) for path in paths])
    assert [entry.path for entry in entries] == [
        "model.safetensors", "model.safetensors.index.json", "config.json", "sub/code.py"
    ]  # fmt: skip
    assert warnings == []
    pickles, _ = onhost.wanted("m", [Entry("pytorch_model.bin", 1, A)])
    assert len(pickles) == 1


@pytest.mark.parametrize("path", ["../evil.safetensors", "/etc/passwd", "a//b", "a/./b", "a\nb"])
def test_a_listing_cannot_name_a_path_outside(path: str) -> None:
    with pytest.raises(Refusal, match="refused as a path"):
        onhost.wanted("m", [Entry("model.safetensors", 1, A), Entry(path, 1, A)])


def test_weights_without_checksum_are_refused_and_small_files_warned_about() -> None:
    good = Entry("model.safetensors", 1, A)
    with pytest.raises(Refusal, match=r"b\.safetensors without sha256"):
        onhost.wanted("m", [good, Entry("b.safetensors", 1, "")])
    entries, warnings = onhost.wanted("m", [good, Entry("config.json", 1, "not a checksum")])
    assert entries[1].sha256 == ""
    assert "config.json" in warnings[0]
    with pytest.raises(Refusal, match="lists no weights"):
        onhost.wanted("m", [Entry("README.md", 1, A)])


@pytest.fixture(params=tiny_models.KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_models.make(tmp_path / "model", request.param)


def check(directory: Path, needs: list[str] = NEEDS) -> structure.Structure:
    files = [path.relative_to(directory).as_posix() for path in directory.rglob("*")]
    return structure.check_structure("tiny", directory, sorted(files), needs)


def test_a_whole_model_passes(model: Path) -> None:
    found = check(model)
    assert found.architectures[0] in ("Glm4ForCausalLM", "Qwen3ForCausalLM")
    assert found.warnings == []


def _cut(model: Path) -> None:
    shard = model / SHARD
    shard.write_bytes(shard.read_bytes()[:-3])


def _grown(model: Path) -> None:
    with (model / SHARD).open("ab") as file:
        file.write(b"\0")


def _header(model: Path) -> None:
    shard = model / SHARD
    shard.write_bytes(shard.read_bytes()[:8] + b"x" + shard.read_bytes()[9:])


def _header_says(text: str) -> Callable[[Path], None]:
    data = text.encode()
    whole = len(data).to_bytes(8, "little") + data + b"x" * 9
    return lambda model: ((model / SHARD).write_bytes(whole) and None) or None


def _other_shard(model: Path) -> None:
    (model / SHARD).write_bytes((model / SHARD.replace("2-of", "1-of")).read_bytes())


def _only_gguf(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    (model / "model.gguf").write_bytes(b"GGUF")


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda model: ((model / name).write_text(text) and None) or None


def _no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def _no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "tokenizer_config.json").write_text("{}")


def _config(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _in_header(change: Callable[[dict[str, dict[str, object]]], None]) -> Callable[[Path], None]:
    """Change a shard's header, and leave its data and size as they are."""

    def spoil(model: Path) -> None:
        data = (model / SHARD).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= length, "the header must not grow"
        (model / SHARD).write_bytes(data[:8] + text.ljust(length) + data[8 + length :])

    return spoil


def _other_shape(header: dict[str, dict[str, object]]) -> None:
    next(v for k, v in header.items() if k != "__metadata__")["shape"] = [3]


def _overlap(header: dict[str, dict[str, object]]) -> None:
    entries = [v for k, v in header.items() if k != "__metadata__"]
    entries.sort(key=lambda entry: entry["data_offsets"])  # type: ignore[arg-type, return-value]
    first, last = entries[1]["data_offsets"]  # type: ignore[misc]
    entries[1]["data_offsets"] = [first - 2, last]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_config(num_hidden_layers=9), "no tensor of layer"),
        (_config(hidden_size=1), "weights and config.json are of two models"),
        (_config(vocab_size=7), "embed_tokens.weight is ["),
        (_in_header(_other_shape), "do not make"),
        (_in_header(_overlap), "a hole or an overlap at"),
        (_text("tokenizer.json", "{"), "tokenizer.json: is no JSON"),
        (_text("tokenizer.json", '{"model": {}}'), "tokenizer.json: holds no vocabulary"),
        (_text("tokenizer_config.json", "[]"), "tokenizer_config.json: is no JSON object"),
        (_text("tokenizer.model", "hello"), "neither SentencePiece nor tiktoken"),
        (_text("qwen.tiktoken", "!!! 0\n"), "qwen.tiktoken: is no list of tokens"),
        (_cut, f"{SHARD}: is "),
        (_grown, "cut short or mixed"),
        (_header, f"{SHARD}: its header is damaged"),
        (_header_says('{"a": {"data_offsets": [0, "x"]}}'), f"{SHARD}: its header is damaged"),
        (_header_says("[" * 9999), f"{SHARD}: its header is damaged"),
        (_other_shard, f"{SHARD}: lacks "),
        (lambda model: (model / SHARD).unlink(), f"{SHARD}: is missing"),
        (_text(SHARD, ""), "is no safetensors file, or cut short (0 bytes)"),
        (_text(SHARD, "GGUF" + "x" * 99), "is a GGUF file under a wrong name"),
        (_text(SHARD, "version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        (_only_gguf, "weights are GGUF"),
        (_text("config.json", "{"), "config.json: config.json: is no JSON"),
        (_text("config.json", "[" * 9999), "config.json: config.json: is no JSON"),
        (_text("config.json", "{}"), "config.json: names no architectures"),
        (lambda model: (model / "config.json").unlink(), "config.json: is missing"),
        (_text("model.safetensors.index.json", "[]"), "index.json: cannot be read"),
        (_no_tokenizer, "no tokenizer"),
        (_no_template, "no chat template"),
    ],
)
def test_what_cannot_be_served_is_named(
    model: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(model)
    with pytest.raises(Refusal) as refusal:
        check(model)
    assert said in str(refusal.value)


def test_parts_with_sizes_of_their_own_and_packed_tensors_are_left_alone() -> None:
    config = {"text_config": {"hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 1}}
    norm = "layers.0.input_layernorm.weight"
    shard = {
        f"model.language_model.{norm}": {"dtype": "BF16", "shape": [8]},
        f"model.visual.{norm}": {"dtype": "BF16", "shape": [5]},
        f"mtp.{norm}": {"dtype": "BF16", "shape": [5]},
        "model.language_model.embed_tokens.weight": {"dtype": "U8", "shape": [64, 1]},
        "model.embed_tokens_per_layer.weight": {"dtype": "BF16", "shape": [3, 3]},
    }
    assert structure.check_shapes(config, {"a": shard}) == []
    config["text_config"]["hidden_size"] = 4
    (complaint,) = structure.check_shapes(config, {"a": shard})
    assert f"a: model.language_model.{norm} is [8], config.json makes it [4]" in complaint
    other = {"thinker_config": {"text_config": {"hidden_size": 4}}}
    assert structure.check_shapes(other, {"a": shard}) == []
    assert structure.check_shapes([], {"a": shard}) == []


def test_real_kinds_of_tokenizers_pass(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\nIg== 1\n")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    assert structure.check_tokenizer(tmp_path, [p.name for p in tmp_path.iterdir()]) == []


def test_every_complaint_is_made_at_once(model: Path) -> None:
    _cut(model)
    _no_template(model)
    with pytest.raises(Refusal) as refusal:
        check(model)
    assert SHARD in str(refusal.value)
    assert "chat template" in str(refusal.value)


def test_no_chat_template_is_needed_for_embeddings(model: Path) -> None:
    _no_template(model)
    check(model, ["tokenizer"])


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    first, second = (tiny_models.make(tmp_path / name, "glm4") for name in "ab")
    other = tiny_models.make(tmp_path / "c", "glm4", seed=2)
    assert (first / SHARD).read_bytes() == (second / SHARD).read_bytes()
    assert (first / SHARD).read_bytes() != (other / SHARD).read_bytes()


def test_weights_are_small_numbers_and_the_vocabulary_is_whole(model: Path) -> None:
    shard = model / "model-00001-of-00003.safetensors"
    length = struct.unpack("<Q", shard.read_bytes()[:8])[0]
    data = shard.read_bytes()[8 + length :][: 2 * tiny_models.TINY.hidden]
    for low, high in zip(data[0::2], data[1::2], strict=True):
        number = struct.unpack("<f", bytes((0, 0, low, high)))[0]
        assert 0.015 < abs(number) < 0.032
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    assert sorted(ids) == list(range(tiny_models.VOCABULARY))
    vocabulary = tokenizer["model"]["vocab"]
    assert all(
        half in vocabulary and "".join(merge.split(" ")) in vocabulary
        for merge in tokenizer["model"]["merges"]
        for half in merge.split(" ")
    )
    config = json.loads((model / "config.json").read_text())
    ends = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    named = json.loads((model / "tokenizer_config.json").read_text())
    assert ends[named["eos_token"]] in config["eos_token_id"]


def test_an_architecture_that_the_release_does_not_know_is_said_as_on_the_operator_s_side() -> None:
    engines = [dict(engine_data.architecture_rules("0.21.0"))]
    for name in ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3Model"):
        assert structure.unserved({"architectures": [name]}, engines) is None
    for name in ("NoSuchForSequenceClassification", "Model", ""):
        assert structure.unserved({"architectures": [name]}, engines)
    unknown = "Glm5NextForConditionalGeneration"
    assert structure.unserved({"architectures": [unknown]}, engines) == (
        engine_data.architecture_problem("0.21.0", unknown)
    )
    later = sorted(
        engine_data.load("0.33.0").architectures - engine_data.load("0.21.0").architectures
    )[0]
    assert structure.unserved({"architectures": [later]}, engines) == (
        engine_data.architecture_problem("0.21.0", later)
    )
    both = [*engines, dict(engine_data.architecture_rules("0.33.0"))]
    assert "0.21.0" in str(structure.unserved({"architectures": [later]}, both))
    custom = {"architectures": [unknown], "auto_map": {"AutoModel": "modeling.X"}}
    assert structure.unserved(custom, engines) is None
    for broken in (None, [], {}, {"architectures": "Qwen3ForCausalLM"}, {"architectures": []}):
        assert structure.unserved(broken, engines) is None
