"""What each vLLM version knows and needs, from vllm_fleet/data/vllm/<version>.json. Pure.

The files are made from the published wheels by ``python -m tools.engine_data``. A version
outside them is answered from the nearest older one (:func:`nearest`), and callers say so.
Functions that end in ``_problem`` return one sentence for the operator, with the remedy, or None.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

Capability = tuple[int, int]  # CUDA compute capability: (8, 0) is an A100

# CUDA's own table of minor-version compatibility: the oldest driver that runs programs built
# with this major version. PTX is exempt: it needs the driver of the CUDA that made it.
MINIMUM_DRIVER = {12: 525, 13: 580}


# config/model.py: _SUFFIX_TO_DEFAULTS. A model under one of POOLING is made of the one whose name
# ends in another of these (models/registry.py: _normalize_arch).
POOLING = (
    *("ForTextEncoding", "EmbeddingModel", "ForSequenceClassification", "ForTokenClassification"),
    *("ForAudioClassification", "ForImageClassification", "ForVideoClassification"),
    *("ClassificationModel", "ForRewardModeling", "RewardModel", "Model"),
)
SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", *POOLING)


@dataclass(frozen=True)
class Option:
    """One option of ``vllm serve``, as its parser holds it."""

    opts: tuple[str, ...]  # every spelling; empty for the positional model
    dest: str
    action: str = "store"
    nargs: str | None = None
    type: str = "str"
    of: str = ""  # the configuration class whose fields a JSON value may name
    optional: bool = False
    choices: tuple[str, ...] = ()
    known: tuple[str, ...] = ()  # values vLLM names, where its parser takes any text
    limits: tuple[tuple[str, float], ...] = ()  # ("ge", 1): gt, ge, lt, le

    @property
    def name(self) -> str:
        """Its first long spelling."""
        return next((o for o in self.opts if o.startswith("--")), self.dest)

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.action in {"store_true", "BooleanOptionalAction", "help"}


@dataclass(frozen=True)
class EngineData:
    """One version."""

    version: str
    options: MappingProxyType[str, Option]  # by every spelling
    architectures: frozenset[str]
    removed_architectures: MappingProxyType[str, str]  # name -> last version that had it
    tool_parsers: tuple[str, ...]
    reasoning_parsers: tuple[str, ...]
    values: MappingProxyType[str, tuple[str, ...]]  # dest -> values that it takes
    configs: MappingProxyType[str, tuple[str, ...]]  # configuration class -> its fields
    sampling_parameters: frozenset[str]  # what a request may ask of sampling
    metrics: MappingProxyType[str, str]  # name as exposed -> type; in every server
    some_metrics: MappingProxyType[str, str]  # only where a feature is on
    gpu_memory_utilization: float  # default
    block_size: int  # default, tokens
    batch: tuple[MappingProxyType[str, Any], ...]  # see batch_defaults
    python: str  # such as ">=3.11,<3.15"
    glibc: str  # oldest, such as "2.28"
    torch: str
    cuda: str  # such as "13.0"
    capabilities: tuple[Capability, ...]  # that its kernels were compiled for

    @property
    def minimum_driver(self) -> int:
        """Oldest NVIDIA driver branch."""
        return MINIMUM_DRIVER[int(self.cuda.split(".")[0])]


@cache
def versions() -> tuple[str, ...]:
    """Versions with data, oldest first."""
    folder = files("vllm_fleet") / "data" / "vllm"
    names = (f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
    return tuple(sorted(names, key=_key))


@cache
def load(version: str) -> EngineData:
    """Data of exactly this version; KeyError where there is none."""
    if version not in versions():
        raise KeyError(version)
    text = (files("vllm_fleet") / "data" / "vllm" / f"{version}.json").read_text("utf-8")
    raw = json.loads(text)
    options: dict[str, Option] = {}
    for entry in raw["options"]:
        option = _option(entry)
        options.update(dict.fromkeys(option.opts or (option.dest,), option))
    requires, defaults = raw["requires"], raw["defaults"]
    return EngineData(
        version=version,
        options=MappingProxyType(options),
        architectures=frozenset(a for part in raw["architectures"].values() for a in part),
        removed_architectures=MappingProxyType(raw["removed_architectures"]),
        tool_parsers=tuple(raw["parsers"]["tool"]),
        reasoning_parsers=tuple(raw["parsers"]["reasoning"]),
        values=MappingProxyType({k: tuple(v) for k, v in raw["values"].items()}),
        configs=MappingProxyType({k: tuple(v) for k, v in raw["configs"].items()}),
        sampling_parameters=frozenset(raw["sampling_parameters"]),
        metrics=MappingProxyType(raw["metrics"]),
        some_metrics=MappingProxyType(raw["some_metrics"]),
        gpu_memory_utilization=defaults["gpu_memory_utilization"],
        block_size=defaults["block_size"],
        batch=tuple(MappingProxyType(rule) for rule in defaults["batch"]),
        python=requires["python"],
        glibc=requires["glibc"],
        torch=requires["torch"],
        cuda=requires["cuda"],
        capabilities=tuple(map(capability, requires["capabilities"])),
    )


def nearest(version: str) -> EngineData:
    """Data of this version, else of the newest older one, else of the oldest there is."""
    if version in versions():
        return load(version)
    older = [v for v in versions() if _key(v) <= _key(version)]
    return load(older[-1] if older else versions()[0])


def capability(text: str) -> Capability:
    """ "8.0" -> (8, 0); ValueError for anything else."""
    major, minor = text.split(".")
    return int(major), int(minor)


def bases(architecture: str) -> tuple[str, ...]:
    """Names of the models that vLLM makes one for pooling of; none for other ones."""
    suffix = next((s for s in POOLING if architecture.endswith(s)), "")
    stem = architecture.removesuffix(suffix)
    return tuple(stem + s for s in SUFFIXES) if suffix and stem else ()


def serves(version: str, architecture: str) -> bool:
    """Whether a version with data has an architecture of config.json, or makes it of another."""
    known = load(version).architectures
    return architecture in known or any(base in known for base in bases(architecture))


def first_version_with(architecture: str) -> str | None:
    """The oldest version here that serves an architecture of config.json."""
    return next((v for v in versions() if serves(v, architecture)), None)


def architecture_problem(version: str, architecture: str) -> str | None:
    """Why a version cannot serve an architecture, and which one can."""
    data = nearest(version)
    if serves(data.version, architecture):
        return None
    said = f"vLLM {version} does not know the architecture {architecture}"
    if architecture in data.removed_architectures:
        last = data.removed_architectures[architecture]
        return f"{said} any more: {last} was the last version with it; set vllm_version to {last}"
    first = first_version_with(architecture)
    if first is None:
        return (
            f"{said}, nor does any version from {versions()[0]} to {versions()[-1]}; "
            "check `architectures` in config.json, or wait for a release that has it"
        )
    if _key(first) > _key(version):
        return f"{said}: the first version with it is {first}; set vllm_version to {first} or later"
    had = [v for v in versions() if serves(v, architecture)]
    return f"{said} any more: {had[-1]} was the last version with it; set vllm_version to {had[-1]}"


@cache
def architecture_rules(version: str) -> MappingProxyType[str, Any]:
    """What onhost/weights.py needs to say the same of an architecture without this data."""
    known = nearest(version).architectures
    other = frozenset[str]().union(*(load(v).architectures for v in versions())) - known
    advice = {name: architecture_problem(version, name) for name in sorted(other)}
    unknown = architecture_problem(version, "ARCHITECTURE")
    pooling = {"suffixes": list(SUFFIXES), "pooling": list(POOLING)}
    return MappingProxyType(
        {"known": sorted(known), "advice": advice, "unknown": unknown, **pooling}
    )


def capability_problem(version: str, card: Capability) -> str | None:
    """Whether the kernels of a version run on a card of this compute capability.

    A program built for X.Y runs on every X.Z with Z >= Y, and on no other X.
    """
    data = nearest(version)
    if any(c[0] == card[0] and c[1] <= card[1] for c in data.capabilities):
        return None
    built = ", ".join(f"{a}.{b}" for a, b in data.capabilities)
    fitting = [
        v
        for v in versions()
        if any(c[0] == card[0] and c[1] <= card[1] for c in load(v).capabilities)
    ]
    remedy = (
        f"{fitting[-1]} is the last version built for it"
        if fitting
        else "no version here is: build vLLM from source for it, or use another card"
    )
    return (
        f"vLLM {version} is built for compute capabilities {built}, "
        f"not for this card's {card[0]}.{card[1]}; {remedy}"
    )


def driver_problem(version: str, driver: str) -> str | None:
    """Whether an NVIDIA driver ("580.95.05") is new enough for the CUDA of a version."""
    match = re.match(r"\d+", driver)
    if match is None:
        return f"{driver!r} is no NVIDIA driver version; see what nvidia-smi says on the host"
    data = nearest(version)
    if int(match[0]) >= data.minimum_driver:
        return None
    fitting = [v for v in versions() if load(v).minimum_driver <= int(match[0])]
    other = f", or set vllm_version to {fitting[-1]}, the last one it carries" if fitting else ""
    return (
        f"vLLM {version} is built with CUDA {data.cuda} and needs driver {data.minimum_driver} "
        f"or later, this host has {driver}; install a newer driver{other}"
    )


def glibc_problem(version: str, glibc: str) -> str | None:
    """Whether a host's glibc ("2.35") carries the wheel."""
    data = nearest(version)
    if capability(".".join(glibc.split(".")[:2])) >= capability(data.glibc):
        return None
    fitting = [v for v in versions() if capability(load(v).glibc) <= capability(glibc)]
    other = f"; the newest version it carries is {fitting[-1]}" if fitting else ""
    return (
        f"the wheel of vLLM {version} needs glibc {data.glibc}, this host has {glibc}{other}; "
        "use Debian 12, Ubuntu 22.04 or later"
    )


def python_problem(version: str, python: str) -> str | None:
    """Whether a Python ("3.12.3") may hold a release of this version."""
    data = nearest(version)
    have = tuple(int(p) for p in re.findall(r"\d+", python)[:2])
    for clause in data.python.split(","):
        match = re.match(r"(>=|<)(\d+)\.(\d+)", clause)
        if match is None:
            continue
        bound = int(match[2]), int(match[3])
        if (have < bound) if match[1] == ">=" else (have >= bound):
            return (
                f"vLLM {version} needs Python {data.python}, this host's is {python}; "
                "set `python` to an interpreter in that range"
            )
    return None


def batch_defaults(version: str, memory_gib: float, name: str, card: Capability) -> tuple[int, int]:
    """max_num_batched_tokens and max_num_seqs that ``vllm serve`` takes on a GPU by itself."""
    for rule in nearest(version).batch:
        if memory_gib < rule.get("min_gib", 0):
            continue
        if "not_named" in rule and rule["not_named"] in name.lower():
            continue
        if "not_capability" in rule and capability(rule["not_capability"]) == card:
            continue
        return rule["max_num_batched_tokens"], rule["max_num_seqs"]
    raise LookupError(f"no rule of vLLM {version} covers {name}")  # the last rule has no condition


def _option(entry: dict[str, Any]) -> Option:
    return Option(
        opts=tuple(entry["opts"]),
        dest=entry["dest"],
        action=entry.get("action", "store"),
        nargs=str(entry["nargs"]) if "nargs" in entry else None,
        type=entry.get("type", "str"),
        of=entry.get("of", ""),
        optional=entry.get("optional", False),
        choices=tuple(entry.get("choices", ())),
        known=tuple(entry.get("known", ())),
        limits=tuple(entry.get("range", {}).items()),
    )


def _key(version: str) -> tuple[int, ...]:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    return numbers + (0,) * (3 - len(numbers))
