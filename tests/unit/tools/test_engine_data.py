"""The tool that reads wheels, on a small source tree and a small wheel of our own."""

from __future__ import annotations

import http.server
import io
import struct
import threading
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from tools.engine_data import cubins, facts, wheels
from tools.engine_data.options import Kind, Reader
from tools.engine_data.source import Sources

SOURCES = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": "from vllm.config.model import *\n",
    "vllm/config/model.py": '''
from typing import Any, ClassVar, Literal, TYPE_CHECKING
from enum import Enum
from pydantic import Field
from dataclasses import InitVar, field

if TYPE_CHECKING:
    Method = Literal["never", "seen"]
else:
    Method = Any

Size = Literal["small", "large"]
Mode = Literal["fast", Size]

class Level(Enum):
    LOW = "low"

@config
class Inner:
    depth: int = 1

@config
class BaseConfig:
    name: str = "base"

@config
class ModelConfig(BaseConfig):
    """A model."""
    DEFAULT: ClassVar[int] = 16
    mode: Mode = "fast"
    method: Method | str | None = None
    backend: Mode | str | None = None
    share: float = Field(default=0.9, gt=0, le=1)
    length: int | None = None
    max_num_batched_tokens: int = Field(default=DEFAULT * 2, ge=1)
    switch: bool | None = None
    files: list[str] = field(default_factory=lambda: ["a"])
    sizes: set[int] = field(default_factory=set)
    extra: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] | str | None = None
    inner: Inner = Field(default_factory=Inner)
    level: Level = Level.LOW
    given: InitVar[int] = 3
''',
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
import argparse, json, sys
from vllm.config import ModelConfig

def optional_type(t): ...

def _compute_kwargs(cls):
    if name in ("max_num_batched_tokens", "other"):
        kwargs[name]["type"] = human_readable_int
    kwargs[name]["choices"].append("None")

class EngineArgs:
    seed: int = 7
    @staticmethod
    def add_cli_args(parser):
        model_kwargs = get_kwargs(ModelConfig)
        group = parser.add_argument_group(title="ModelConfig", description=ModelConfig.__doc__)
        if not ("serve" in sys.argv[1:] and "--help" in sys.argv[1:]):
            group.add_argument("--name", "-n", **model_kwargs["name"])
        group.add_argument("--mode", **model_kwargs["mode"])
        group.add_argument("--method", **model_kwargs["method"])
        group.add_argument("--backend", **model_kwargs["backend"])
        group.add_argument("--share", **{**model_kwargs["share"], "default": None})
        group.add_argument("--length", **model_kwargs["length"])
        group.add_argument("--tokens", **model_kwargs["max_num_batched_tokens"])
        group.add_argument("--switch", "-s", **model_kwargs["switch"])
        group.add_argument("--files", **model_kwargs["files"])
        model_kwargs["sizes"]["choices"] = [1, 2]
        model_kwargs["sizes"]["choices"] += [3]
        group.add_argument("--sizes", **model_kwargs["sizes"])
        group.add_argument("--extra", **model_kwargs["extra"])
        group.add_argument("--overrides", **model_kwargs["overrides"])
        group.add_argument("--inner", **model_kwargs["inner"])
        group.add_argument("--level", **model_kwargs["level"])
        level = model_kwargs["mode"]
        level["type"] = lambda s: s.lower()
        group.add_argument("--lower-mode", **level)
        parser.add_argument("--quiet", action="store_true", help="Quiet.")
        return parser

class AsyncEngineArgs(EngineArgs):
    log: bool = False
    @staticmethod
    def add_cli_args(parser, async_args_only: bool = False):
        if not async_args_only:
            parser = EngineArgs.add_cli_args(parser)
        parser.add_argument("--log", action=argparse.BooleanOptionalAction,
                            default=AsyncEngineArgs.log)
        return parser
""",
    "vllm/entrypoints/openai/cli_args.py": '''
import json
from vllm.engine.arg_utils import AsyncEngineArgs

@config
class BaseFrontendArgs:
    origins: list[str] = field(default_factory=lambda: ["*"])

    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs["origins"]["type"] = json.loads
        if "nargs" in frontend_kwargs["origins"]:
            del frontend_kwargs["origins"]["nargs"]
        return frontend_kwargs

    @classmethod
    def add_cli_args(cls, parser):
        frontend_kwargs = get_kwargs(cls)
        frontend_kwargs = cls._customize_cli_kwargs(frontend_kwargs)
        group = parser.add_argument_group(title=cls.__name__.replace("Args", ""))
        for key, value in frontend_kwargs.items():
            extra = value.pop("flags", [])
            group.add_argument(*extra, f"--{key.replace('_', '-')}", **value)
        return parser

@config
class FrontendArgs(BaseFrontendArgs):
    middleware: list[str] = field(default_factory=lambda: [])

    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs = super()._customize_cli_kwargs(frontend_kwargs)
        frontend_kwargs["middleware"]["action"] = "append"
        del frontend_kwargs["middleware"]["nargs"]
        return frontend_kwargs

def make_arg_parser(parser):
    """Parser."""
    parser.add_argument("model_tag", type=str, nargs="?")
    parser = FrontendArgs.add_cli_args(parser)
    parser = AsyncEngineArgs.add_cli_args(parser)
    return parser
''',
    "vllm/entrypoints/cli/serve.py": """
class ServeSubcommand:
    def subparser_init(self, subparsers):
        serve_parser = subparsers.add_parser(self.name)
        serve_parser = make_arg_parser(serve_parser)
        serve_parser.add_argument("--grpc", action="store_true", default=False)
        return serve_parser
""",
}


@pytest.fixture(scope="module")
def options() -> dict[str, dict[str, Any]]:
    return {o["dest"]: o for o in Reader(Sources(SOURCES)).options()}


def test_every_option_is_found_in_order(options: dict[str, dict[str, Any]]) -> None:
    assert list(options) == [
        "help", "model_tag", "origins", "middleware", "name", "mode", "method", "backend", "share",
        "length", "tokens", "switch", "files", "sizes", "extra", "overrides", "inner", "level",
        "lower_mode", "quiet", "log", "grpc",
    ]  # fmt: skip
    assert options["name"]["opts"] == ["--name", "-n"]
    assert options["model_tag"]["group"] == "positional arguments"
    assert options["origins"]["group"] == "Frontend"


@pytest.mark.parametrize(
    ("dest", "key", "value"),
    [
        ("name", "default", "base"),
        ("mode", "choices", ["fast", "large", "small"]),
        ("method", "type", Kind("str", optional=True)),
        ("backend", "known", ["fast", "large", "small"]),
        ("share", "range", {"gt": 0, "le": 1}),
        ("share", "default", None),
        ("length", "type", Kind("int", optional=True)),
        ("tokens", "type", Kind("human_int")),
        ("tokens", "default", 32),
        ("switch", "opts", ["--switch", "--no-switch", "-s"]),
        ("files", "nargs", "+"),
        ("files", "default", ["a"]),
        ("sizes", "type", Kind("int")),
        ("sizes", "choices", [1, 2, 3]),
        ("extra", "type", Kind("json")),
        ("overrides", "type", Kind("dict_or_str", optional=True)),
        ("inner", "type", Kind("config", of="Inner")),
        ("lower_mode", "type", Kind("lower")),
        ("origins", "type", Kind("loads")),
        ("middleware", "action", "append"),
        ("quiet", "default", False),
        ("log", "default", False),
    ],
)
def test_what_an_option_is(
    options: dict[str, dict[str, Any]], dest: str, key: str, value: object
) -> None:
    assert options[dest].get(key) == value


def test_what_only_type_checkers_see_is_no_value(options: dict[str, dict[str, Any]]) -> None:
    assert "choices" not in options["method"]
    assert "known" not in options["method"]
    assert "nargs" not in options["origins"]


def test_enumerations_and_fields_of_configurations() -> None:
    reader = Reader(Sources(SOURCES))
    level = {o["dest"]: o for o in reader.options()}["level"]
    assert reader.made(level["default"]) == "low"
    assert reader.configs == {"Inner": ["depth"]}


def test_a_name_that_is_missing_is_no_guess() -> None:
    broken = dict(SOURCES)
    broken["vllm/config/__init__.py"] = "from vllm.config.model import Nothing as ModelConfig\n"
    with pytest.raises(LookupError, match="has no Nothing"):
        Reader(Sources(broken)).options()


BATCH = """
class EngineArgs:
    @classmethod
    def get_batch_defaults(cls, world_size):
        if device_memory >= 70 * GiB_bytes and {test}:
            default_max_num_seqs = {{UsageContext.OPENAI_API_SERVER: 1024}}
        else:
            default_max_num_seqs = {{UsageContext.OPENAI_API_SERVER: 256}}
"""


def test_batch_rules_and_a_condition_not_known() -> None:
    name = "vllm/engine/arg_utils.py"
    known = Sources({name: BATCH.format(test="'a100' not in device_name")})
    assert facts.batch_defaults(known) == [
        {"min_gib": 70, "not_named": "a100", "max_num_seqs": 1024},
        {"max_num_seqs": 256},
    ]
    with pytest.raises(LookupError, match="asks is_full_moon"):
        facts.batch_defaults(Sources({name: BATCH.format(test="is_full_moon")}))


def test_metrics_with_and_without_a_condition() -> None:
    sources = Sources(
        {
            "vllm/v1/metrics/loggers.py": """
def init(self):
    gauge = self._gauge_cls(name="vllm:running")
    if lora:
        self._gauge_cls(name="vllm:lora")
    self._counter_cls(name="vllm:tokens")
    self._histogram_cls(name="vllm:seconds")
    name = None
    if kind:
        name = "vllm:info"
    self._gauge_cls(name=name)
""",
            "vllm/v1/spec_decode/metrics.py": """
def init(self):
    specs = [("vllm:drafts", "Drafts.")]
    made = [self._counter_cls(name=n, documentation=d) for n, d in specs]
""",
        }
    )
    always, sometimes = facts.metrics(sources)
    vllm = {k: v for k, v in always.items() if k.startswith("vllm:")}
    assert vllm == {
        "vllm:running": "gauge",
        "vllm:tokens_total": "counter",
        "vllm:tokens_created": "gauge",
        "vllm:seconds": "histogram",
        "vllm:seconds_created": "gauge",
        "vllm:info": "gauge",
    }
    assert sometimes == {
        "vllm:drafts_created": "gauge",
        "vllm:drafts_total": "counter",
        "vllm:lora": "gauge",
    }


def fat_binary(*programs: tuple[int, int]) -> bytes:
    """A fat binary with one small program for each (kind, architecture)."""
    entries = b"".join(
        struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, 8, 0, 0, 0, 0, arch, 0, 0, 0, 0, 0)
        + b"\0" * 8
        for kind, arch in programs
    )
    return cubins.MAGIC + struct.pack("<Q", len(entries)) + entries


def test_architectures_of_a_shared_object() -> None:
    many = [fat_binary((2, 75), (2, 80), (1, 90))] * 20
    data = b"\x7fELF" + b"junk".join([*many, fat_binary((2, 52))])
    found = cubins.architectures(data)
    assert found == {("sm", 75): 20, ("sm", 80): 20, ("ptx", 90): 20, ("sm", 52): 1}
    assert facts.capabilities(found) == ["7.5", "8.0"]


def test_requirements_from_name_and_metadata() -> None:
    metadata = {
        "requires_python": "<3.15,>=3.11",
        "requires_dist": [
            "torch==2.14.0",
            "flashinfer-python==0.7.2.post1",
            "transformers<5.21.0,>=5.16.1",
            'ray>=2; extra == "ray"',
        ],
    }
    found = facts.requirements("vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl", metadata)
    assert found == {
        "python": ">=3.11,<3.15",
        "glibc": "2.28",
        "torch": "2.14.0",
        "transformers": "<5.21.0,>=5.16.1",
        "flashinfer": "0.7.2.post1",
    }
    assert facts.cuda_of_torch({"requires_dist": ["nvidia-cuda-runtime==13.0.96; x"]}) == "13.0"
    assert facts.cuda_of_torch({"requires_dist": ["cuda-toolkit[cudart]==13.0.3"]}) == "13.0"
    with pytest.raises(LookupError):
        facts.cuda_of_torch({"requires_dist": ["numpy"]})


@pytest.fixture
def served() -> Iterator[tuple[str, list[int]]]:
    """Address of a wheel of 4 MB that answers ranges, and the bytes that were read of it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("vllm/a.py", "A = 1\n")
        archive.writestr("vllm/_C.abi3.so", b"\0" * 4_000_000)
        archive.writestr("vllm/b.py", "B = 2\n")
    content, sent = buffer.getvalue(), list[int]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start = int(first) if first else len(content) - int(last)
            end = int(last) + 1 if first and last else len(content)
            part = content[start:end]
            sent.append(len(part))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/x-1-py3-none-any.whl", sent
    server.shutdown()
    server.server_close()


def test_only_the_members_asked_for_are_read(served: tuple[str, list[int]]) -> None:
    url, sent = served
    wheel = wheels.Wheel(url, {})
    texts = wheels.read(wheel, lambda name: name.endswith(".py"))
    assert texts == {"vllm/a.py": "A = 1\n", "vllm/b.py": "B = 2\n"}
    assert sum(sent) < 200_000
    assert len(wheels.read_binary(wheel, ["vllm/_C.abi3.so"])["vllm/_C.abi3.so"]) == 4_000_000
