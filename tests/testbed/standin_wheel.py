"""Packs `tests/testbed/standin` as wheels named vllm-standin, each a version with a behaviour.

A release made from one goes the whole way of a real one: lock with hashes, its own virtual
environment, ``vllm --version``, the unit, the gate. Only the engine is missing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vllm_fleet import metrics

PACKAGE = "vllm-standin"
SOURCE = Path(__file__).parent / "standin"
NEEDS = ("uvicorn", "h11", "click")
Fault = Literal["", "no start", "500", "never ends"]
# What a command line is rehearsed with: the names of vLLM's own parser, the stand-in's behind.
REHEARSAL = {
    "utils/argparse_utils": """\
from vllm import server
class FlexibleArgumentParser:
    def __init__(self, prog): pass
    def add_subparsers(self, **_): return self
    def parse_args(self, words):
        from types import SimpleNamespace
        options = server.parse(words, server.behaviour().removed)
        return SimpleNamespace(model_tag=options["model"])
""",
    "entrypoints/cli/serve": """\
class ServeSubcommand:
    def subparser_init(self, parsers): return parsers
    def validate(self, args): pass
""",
    "engine/arg_utils": """\
class AsyncEngineArgs:
    @classmethod
    def from_cli_args(cls, args): return cls()
    def create_engine_config(self): pass
""",
}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal input gives equal bytes


@dataclass(frozen=True)
class Behaviour:
    """How a version of the stand-in behaves; defaults are those of a good one."""

    start_seconds: float = 0.5
    first_token_seconds: float = 0.02
    tokens_per_second: float = 200.0
    kv_tokens: int = 100_000
    kv_gib: float = 1.0
    fault: Fault = ""
    crash_seconds: float = 0.0  # the engine dies so long after its first client; 0: never
    removed: tuple[str, ...] = ()  # options it no longer knows


def build(folder: Path, version: str, behaviour: Behaviour | None = None) -> Path:
    """The wheel of a version, in ``folder``."""
    packed = {
        "version": version,
        "metrics": sorted(n for n in metrics.series(_known(version)) if n.startswith("vllm:")),
        **asdict(behaviour or Behaviour()),
    }
    info = f"vllm_standin-{version}.dist-info"
    content = {
        "vllm/__init__.py": f'"""A stand-in of tests."""\n\n__version__ = "{version}"\n',
        "vllm/server.py": (SOURCE / "server.py").read_text(encoding="utf-8"),
        "vllm/behaviour.json": json.dumps(packed, indent=1),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {name}\n" for name in NEEDS),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nvllm = vllm.server:main\n",
    }
    # modules that a release is tried with
    empty = dict.fromkeys(("entrypoints/openai/api_server", "v1/engine/core"), "")
    for module, source in {**empty, **REHEARSAL}.items():
        parts = module.split("/")
        for depth in range(1, len(parts)):
            content["/".join(["vllm", *parts[:depth], "__init__.py"])] = ""
        content[f"vllm/{module}.py"] = source
    record = "".join(
        f"{name},sha256={_digest(text)},{len(text.encode())}\n"
        for name, text in sorted(content.items())
    )
    content[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm_standin-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in content.items():
            wheel.writestr(zipfile.ZipInfo(name, _EPOCH), text)
    return path


def lock(wheel: Path, engine_lock: str) -> str:
    """A lock with hashes of the stand-in; what it needs comes from the real engine's lock."""
    version = wheel.name.split("-")[1]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    parts = [f"{PACKAGE}=={version} \\\n    --hash=sha256:{digest}\n"]
    for name in NEEDS:
        found = re.search(rf"(?m)^{name}==(?:.*\\\n)*.*\n?", engine_lock)
        assert found, f"{name} is not in the engine's lock"
        parts.append(found[0].rstrip() + "\n")
    return "".join(parts)


def _known(version: str) -> str:
    """The newest version up to this one whose metrics are known."""

    def order(text: str) -> list[int]:
        return [int(part) for part in text.split(".")]

    return max((v for v in metrics.versions() if order(v) <= order(version)), key=order)


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
