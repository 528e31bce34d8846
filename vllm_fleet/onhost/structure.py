"""What weights look like that can be served: looked at without their tensors' data.

Shared by weights.py, which refuses what cannot be served before it is switched in.
"""

import base64
import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple

if __package__:
    from vllm_fleet.onhost import tools
else:  # on a host: a flat directory of scripts
    import tools  # type: ignore[no-redef]

Refusal = tools.Refusal

LARGEST_HEADER = 100 << 20  # what the safetensors library itself accepts
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
# Bits of an element; a type that is not here is not measured.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
PLAIN = ("F16", "BF16", "F32", "F64")  # of a tensor that no quantisation packs
# Parts of a model that have sizes of their own beside the language model's.
ASIDE = re.compile(
    r"(?i)visual|vision|image|audio|tower|speech|talker|mtp|draft|nextn|eagle|per_layer"
)
SOME = 3  # names of a kind in one complaint


@dataclass(frozen=True)
class Structure:
    """What looking at the files of a directory found out."""

    architectures: List[str]
    warnings: List[str]


def check_structure(
    name: str, directory: Path, files: List[str], needs: Iterable[str]
) -> Structure:
    """Look at the files without their tensors' data. Refuses with every complaint at once."""
    complaints: List[str] = []
    warnings: List[str] = []
    shards: Dict[str, Dict[str, Any]] = {}
    for path in files:
        if _is_lfs_pointer(directory / path):
            complaints.append(
                f"{path}: is a Git LFS pointer, not the file; fetch it by the hub's library or "
                "`git lfs pull`"
            )
        elif path.endswith(".safetensors"):
            try:
                shards[path] = safetensors_header(directory / path)
            except ValueError as error:
                complaints.append(f"{path}: {error}")
    complaints += _check_index(directory, files, shards)
    if not any(path.endswith(".safetensors") for path in files):
        if any(path.endswith((".bin", ".pt", ".pth")) for path in files):
            warnings.append("weights are pickles (.bin, .pt): loading them can run code")
        elif any(path.endswith(".gguf") for path in files):
            complaints.append(
                "weights are GGUF, for llama.cpp; use the model's safetensors repository"
            )
        else:
            complaints.append("no weights (*.safetensors) in it")
    architectures: List[str] = []
    try:
        architectures = _architectures(directory)
    except ValueError as error:
        complaints.append(f"config.json: {error}")
    else:
        complaints += check_shapes(_json(directory / "config.json"), shards)
    wanted_checks = set(needs)
    if "tokenizer" in wanted_checks and not _has_tokenizer(files):
        complaints.append(
            "no tokenizer (tokenizer.json, tokenizer.model, *.tiktoken); every request would fail: "
            "take a complete repository, or name one with vllm_args: {tokenizer: ...}"
        )
    elif "tokenizer" in wanted_checks:
        complaints += check_tokenizer(directory, files)
    if "chat_template" in wanted_checks:
        try:
            if not has_chat_template(directory, files):
                complaints.append(
                    "no chat template (tokenizer_config.json, chat_template.jinja); every chat "
                    "would be answered 400: give one by vllm_args: {chat-template: ...}, or set "
                    "task: embed or rerank"
                )
        except ValueError as error:
            complaints.append(str(error))
    if complaints:
        text = "\n".join(f"    {complaint}" for complaint in complaints)
        raise Refusal(f"{name}: {directory}: these weights cannot be served:\n{text}")
    return Structure(architectures, warnings)


def safetensors_header(path: Path) -> Dict[str, Any]:
    """The header of a safetensors file: tensor to {dtype, shape, data_offsets}.

    ValueError in words when it is none, or is longer or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] == b"GGUF":
            raise ValueError("is a GGUF file under a wrong name")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise ValueError(f"is no safetensors file, or cut short ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            spans = sorted(
                (*(int(offset) for offset in entry["data_offsets"]), name)
                for name, entry in header.items()
            )
            end = max((last for _, last, _ in spans), default=0)
            odd = _odd_span(header, spans)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            raise ValueError("its header is damaged") from None
    if 8 + length + end != size:
        raise ValueError(f"is {size} bytes, its header says {8 + length + end}: cut short or mixed")
    if odd:
        raise ValueError(odd)
    return dict(header)


def _odd_span(header: Mapping[str, Any], spans: List[Tuple[int, int, str]]) -> str:
    """What is wrong with the places of tensors in a file, or "".

    They must follow each other without holes, as the library demands at the start, and each must
    be as long as its type and shape say.
    """
    at = 0
    for first, last, name in spans:
        if first != at:
            return f"its header leaves a hole or an overlap at {name}: damaged, or made by hand"
        at = last
        bits = BITS.get(header[name]["dtype"])
        if bits and math.prod(header[name]["shape"]) * bits != 8 * (last - first):
            return (
                f"{name} has {last - first} bytes, which its type {header[name]['dtype']} and "
                f"shape {header[name]['shape']} do not make"
            )
    return ""


def _check_index(
    directory: Path, files: List[str], shards: Mapping[str, Mapping[str, Any]]
) -> List[str]:
    index = "model.safetensors.index.json"
    if index not in files:
        return []
    try:
        where = _json(directory / index)["weight_map"]
        pairs = [(str(tensor), str(shard)) for tensor, shard in where.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index}: cannot be read ({error})"]
    complaints = [
        f"{shard}: is missing, {index} names it"
        for shard in sorted({shard for _, shard in pairs} - set(files))
    ]
    lost = [(tensor, shard) for tensor, shard in pairs
            if shard in shards and tensor not in shards[shard]]  # fmt: skip
    if lost:
        tensor, shard = lost[0]
        complaints.append(f"{shard}: lacks {tensor} and {len(lost) - 1} more that {index} names")
    return complaints


def check_shapes(config: Any, shards: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """Whether the tensors are those of this config.json: layers, vocabulary, width.

    Weights of one model beside the config.json of another start with a trace of many lines, or,
    where a layer is missing, with random numbers in its place. Parts with sizes of their own
    (vision towers, MTP layers) and packed tensors are left alone.
    """
    if not isinstance(config, dict):
        return []
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config

    def number(key: str) -> Optional[int]:
        value = text.get(key, config.get(key))
        return value if type(value) is int and value > 0 else None

    width, vocabulary, layers = map(number, ("hidden_size", "vocab_size", "num_hidden_layers"))
    complaints: List[str] = []
    found: Set[int] = set()
    wrong: List[str] = []
    for shard, tensors in shards.items():
        for name, entry in tensors.items():
            if ASIDE.search(name):
                continue
            layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
            if layer:
                found.add(int(layer[1]))
            wanted: Optional[List[int]] = None
            if width and name.endswith(".input_layernorm.weight"):
                wanted = [width]
            elif width and vocabulary and re.search(r"(^|\.)embed_tokens\.weight$", name):
                wanted = [vocabulary, width]
            if wanted and entry["dtype"] in PLAIN and list(entry["shape"]) != wanted:
                wrong.append(f"{shard}: {name} is {entry['shape']}, config.json makes it {wanted}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        complaints.append(f"{wrong[0]}{more}: weights and config.json are of two models")
    # A config with settings by block may leave whole blocks out.
    lost = sorted(set(range(layers or 0)) - found) if found and "block_configs" not in text else []
    if lost:
        named = ", ".join(map(str, lost[:SOME])) + (" ..." if len(lost) > SOME else "")
        complaints.append(
            f"no tensor of layer {named}: config.json says {layers} layers, {len(found)} are there"
        )
    return complaints


def check_tokenizer(directory: Path, files: Iterable[str]) -> List[str]:
    """Whether the tokenizer's files can be what they are named; the engine dies of others."""
    complaints: List[str] = []
    for name in sorted(files):
        path = directory / name
        if _is_lfs_pointer(path):
            continue  # told already
        try:
            if name == "tokenizer.json":
                model = _object(path).get("model")
                if not isinstance(model, dict) or not model.get("vocab"):
                    raise ValueError("holds no vocabulary")
            elif name in ("vocab.json", "tokenizer_config.json", "special_tokens_map.json"):
                _object(path)
            elif name == "tokenizer.model":
                with path.open("rb") as file:
                    start = file.read(1)
                # SentencePiece: a list of pieces, field 1 with a length; else tiktoken's lines.
                if start != b"\x0a" and not _is_tiktoken(path):
                    raise ValueError("is neither SentencePiece nor tiktoken")
            elif name.endswith(".tiktoken") and not _is_tiktoken(path):
                raise ValueError("is no list of tokens in base64 with their ranks")
        except (OSError, ValueError) as error:
            complaints.append(f"{name}: {error}; the tokenizer cannot be loaded from it")
    return complaints


def _is_tiktoken(path: Path) -> bool:
    with path.open("rb") as file:
        for number in range(SOME):
            text = file.readline(1 << 16)
            if number and not text:
                return True
            line = text.split()
            if len(line) != 2 or not line[1].isdigit():
                return False
            try:
                base64.b64decode(line[0], validate=True)
            except ValueError:
                return False
    return True


def _object(path: Path) -> Dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    return found


def unserved(config: Any, engines: Iterable[Mapping[str, Any]]) -> Optional[str]:
    """Why one of the wanted releases cannot serve a config.json; None where all can, or may.

    Each engine: "known": its architectures; "advice": sentence by other ones; "unknown": the
    sentence for all the rest, with ARCHITECTURE in it; "pooling": endings of those that it makes
    of the known ones that end in one of "suffixes".
    """
    named = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(named, list) or not named or "auto_map" in config:
        return None  # the code of a custom one comes with the repository
    for engine in engines:
        if not any(_serves(engine, str(one)) for one in named):
            one = str(named[0])
            sentence = engine["advice"].get(one) or engine["unknown"].replace("ARCHITECTURE", one)
            return str(sentence)
    return None


def _serves(engine: Mapping[str, Any], one: str) -> bool:
    """Whether an engine has an architecture, or makes it of another: engine_data.serves."""
    suffix = next((s for s in engine["pooling"] if one.endswith(s)), "")
    stem = one[: len(one) - len(suffix)]
    names = [stem + s for s in engine["suffixes"]] if suffix and stem else []
    return any(name in engine["known"] for name in [one, *names])


def _architectures(directory: Path) -> List[str]:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError("is missing")
    config = _json(path)
    named = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(named, list) or not named:
        raise ValueError("names no architectures")
    return [str(architecture) for architecture in named]


def _has_tokenizer(files: Iterable[str]) -> bool:
    return any(path in TOKENIZERS or path.endswith((".tiktoken", ".spm")) for path in files)


def has_chat_template(directory: Path, files: Iterable[str]) -> bool:
    """Whether these files of a directory hold a chat template."""
    names = set(files)
    if names & set(TEMPLATES) or any(n.startswith("additional_chat_templates/") for n in names):
        return True
    if "tokenizer_config.json" not in names:
        return False
    config = _json(directory / "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _is_lfs_pointer(path: Path) -> bool:
    if path.stat().st_size > 1024:
        return False
    with path.open("rb") as file:
        return file.read(24) == b"version https://git-lfs."


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: is no JSON ({error})") from None
