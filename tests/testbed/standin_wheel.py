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
from typing import Any, Literal

from vllm_fleet import engine_data
from vllm_fleet.spec.model import BETWEEN_TOKENS_BOUNDS, FIRST_TOKEN_BOUNDS

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
# Labels beside model and engine, and the bounds of histograms, as a real server has them.
LABELS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm:request_success_total": {"finished_reason": ("stop", "length", "abort", "error")},
    "vllm:num_requests_waiting_by_reason": {"reason": ("capacity", "deferred")},
    "vllm:admission_rejections_total": {"reason": ("max_num_queued_reqs", "max_num_queued_tokens")},
}
SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
BOUNDS = {
    "vllm:time_to_first_token_seconds": FIRST_TOKEN_BOUNDS,
    "vllm:inter_token_latency_seconds": BETWEEN_TOKENS_BOUNDS,
}
OF_THE_SERVER = ("vllm:admission_rejections_total",)  # not of one of its engines
PROCESS = ("process_start_time_seconds", "process_resident_memory_bytes")
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
        "metrics": exported(version),
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


def source_digest() -> str:
    """Names the stand-in as it stands here: two of one version may differ."""
    parts = (SOURCE / "server.py", Path(__file__))
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:12]


def exported(version: str) -> dict[str, dict[str, Any]]:
    """Every metric of vLLM that a version exports: kind, labels of its own, bounds."""
    return {
        name: {
            "kind": kind,
            "engine": name not in OF_THE_SERVER,
            "labels": LABELS.get(name, {}),
            "bounds": BOUNDS.get(name, SECONDS if name.endswith("_seconds") else TOKENS),
        }
        for name, kind in engine_data.nearest(version).metrics.items()
        if (name.startswith("vllm:") and not name.endswith("_created")) or name in PROCESS
    }


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
