"""Writes vllm_fleet/data/vllm/<version>.json from the published wheels.

    python -m tools.engine_data 0.33.0 0.34.0     # these versions
    python -m tools.engine_data                   # every version that has a file already

Nothing is installed and nothing of vLLM's is run: the wheels are read through pip's own index
configuration, by ranges (about 2 MB of source and one shared object of 50 to 180 MB each), and
the source is read as syntax trees. ``--cache DIR`` keeps what was read between runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tools.engine_data import cubins, facts, wheels
from tools.engine_data.options import Kind, Opaque, Reader
from tools.engine_data.source import Sources

DATA = Path(__file__).parents[2] / "vllm_fleet" / "data" / "vllm"
KERNELS = ("vllm/_C.abi3.so", "vllm/_C_stable_libtorch.abi3.so")


TEMPLATES = "vllm/transformers_utils/chat_templates/"


def wanted(name: str) -> bool:
    """Whether a member of the wheel is needed: Python source, but not of models and kernels."""
    if name.startswith(TEMPLATES) and name.endswith(".jinja"):
        return True
    if not name.startswith("vllm/") or not name.endswith(".py"):
        return False
    if name.startswith("vllm/model_executor/models/"):
        return name.endswith("/registry.py")
    if name.startswith("vllm/model_executor/layers/"):
        return name.endswith("/quantization/__init__.py")
    return not name.startswith(("vllm/third_party/", "vllm/vllm_flash_attn/"))


def build(version: str, cache: Path | None = None) -> dict[str, Any]:
    """Everything about one version."""
    wheel = wheels.find("vllm", version)
    sources = Sources(_cached(cache, version, wheel))
    reader = Reader(sources)
    options = [_plain(o, reader) for o in reader.options()]
    requires = facts.requirements(wheel.filename, wheel.metadata)
    requires["cuda"] = facts.cuda_of_torch(wheels.find("torch", requires["torch"]).metadata)
    requires["capabilities"] = _capabilities(cache, version, wheel)
    always, sometimes = facts.metrics(sources)
    by_dest = {o["dest"]: o for o in options}
    return {
        "version": version,
        "wheel": wheel.filename,
        "requires": requires,
        "defaults": {
            "gpu_memory_utilization": by_dest["gpu_memory_utilization"]["default"],
            "block_size": by_dest["block_size"].get("default")
            or facts.class_constants(sources, "vllm.config.cache", "CacheConfig").get(
                "DEFAULT_BLOCK_SIZE"
            ),
            "batch": facts.batch_defaults(sources),
        },
        "parsers": facts.parsers(sources),
        "values": facts.values(sources)
        | {
            "chat_template": sorted(
                n.removeprefix(TEMPLATES)
                for n in sources.texts
                if n.startswith(TEMPLATES) and n.endswith(".jinja")
            )
        },
        "sampling_parameters": facts.sampling_parameters(sources),
        "architectures": facts.architectures(sources),
        "removed_architectures": facts.removed_architectures(sources),
        "metrics": always,
        "some_metrics": sometimes,
        "configs": dict(sorted(reader.configs.items())),
        "options": options,
    }


def write(data: dict[str, Any], folder: Path) -> Path:
    """One line for each option and each entry, so that two versions compare line by line."""
    lines = []
    for key, value in data.items():
        if key == "options":
            inner = ",\n".join(f"  {_json(o)}" for o in value)
            lines.append(f" {_json(key)}: [\n{inner}\n ]")
        elif isinstance(value, dict) and value:
            inner = ",\n".join(f"  {_json(k)}: {_json(v)}" for k, v in value.items())
            lines.append(f" {_json(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {_json(key)}: {_json(value)}")
    path = folder / f"{data['version']}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def _plain(option: dict[str, Any], reader: Reader) -> dict[str, Any]:
    """An option as JSON holds it; what is unset, or the usual, is left out."""
    result: dict[str, Any] = {"opts": option["opts"], "dest": option["dest"]}
    result["group"] = option["group"]
    if option["action"] != "store":
        result["action"] = option["action"]
    if option.get("nargs") is not None:
        result["nargs"] = option["nargs"]
    kind = option.get("type")
    if isinstance(kind, Kind):
        result["type"] = kind.name
        if kind.of:
            result["of"] = kind.of
        if kind.optional:
            result["optional"] = True
    for name in ("choices", "known"):
        if option.get(name):
            result[name] = [str(c) for c in option[name]]
    if option.get("range"):
        result["range"] = option["range"]
    default = option.get("default")
    if isinstance(default, Opaque):
        default = reader.made(default)
    if default is not None:
        result["default"] = default
    return result


def _cached(cache: Path | None, version: str, wheel: wheels.Wheel) -> dict[str, str]:
    file = cache / f"{version}.json" if cache else None
    if file and file.exists():
        texts: dict[str, str] = json.loads(file.read_text())
        return texts
    texts = wheels.read(wheel, wanted)
    if file:
        file.write_text(json.dumps(texts))
    return texts


def _capabilities(cache: Path | None, version: str, wheel: wheels.Wheel) -> list[str]:
    file = cache / f"{version}-capabilities.json" if cache else None
    if file and file.exists():
        found: list[str] = json.loads(file.read_text())
        return found
    total = cubins.Programs()
    for data in wheels.read_binary(wheel, KERNELS).values():
        total += cubins.architectures(data)
    found = facts.capabilities(total)
    if file:
        file.write_text(json.dumps(found))
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Write the files asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.engine_data", description=__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--cache", type=Path, help="folder that keeps what was read")
    arguments = parser.parse_args()
    if arguments.cache:
        arguments.cache.mkdir(parents=True, exist_ok=True)
    DATA.mkdir(parents=True, exist_ok=True)
    versions = arguments.versions or sorted(p.stem for p in DATA.glob("*.json"))
    for version in versions:
        try:
            path = write(build(version, arguments.cache), DATA)
        except (LookupError, RuntimeError) as error:
            print(f"vllm {version}: {error}", file=sys.stderr)
            return 1
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
