"""What the hosts are and what of the spec they can carry: exam, cards, memory. Pure.

``fleet plan`` shows it; :func:`vllm_fleet.plan.plan_fleet` builds on it, so that both say the
same. Nothing here raises for an odd host: what is wrong is a refused verdict or a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from vllm_fleet import engine, engine_data, weights
from vllm_fleet.cards import Card, worst_link
from vllm_fleet.engine_args import check_args
from vllm_fleet.exam import Seen, Verdict, cards_wanted, examine, look, manageable
from vllm_fleet.jsontext import parsed
from vllm_fleet.model_options import given_options
from vllm_fleet.placement import Decided, Placed, decide
from vllm_fleet.sizing import (
    Choice,
    Choices,
    RefusedError,
    Sizing,
    SizingError,
    Traffic,
    choose,
    gpu_from_smi,
    options,
    size,
)
from vllm_fleet.spec.engine_options import architecture_problem
from vllm_fleet.spec.inputs import Inputs, config_path, version_of
from vllm_fleet.spec.model import Fleet, HostSpec, Instance, Model, Rank, Task
from vllm_fleet.spec.spans import degrees
from vllm_fleet.state import HostState

# Links in the words of sizing.choose, by those of nvidia-smi.
LINKS = {
    "NV": "nvlink",
    "XGMI": "nvlink",
    "C2C": "nvlink",
    "PIX": "pcie-switch",
    "PXB": "pcie-switch",
    "PHB": "host-bridge",
    "NODE": "numa",
    "NUMA": "numa",
    "SYS": "sys",
}

# What stamps of verified weights say, by their path and the host that has them.
Stamps = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Sized:
    """Memory of one instance, and settings for it."""

    source: str = ""  # where its config.json comes from; "" where it is not known
    why_not: str = ""  # why it is not sized
    sizing: Sizing | None = None  # of what will run
    choices: Choices | None = None
    applied: bool = False  # whether the chosen settings are used
    total_gib: float = 0.0  # of each card, as torch counts it
    reasons: tuple[str, ...] = ()  # why it cannot be served
    warnings: tuple[str, ...] = ()

    @property
    def args(self) -> dict[str, object]:
        """Chosen options of ``vllm serve`` that are used; none where the operator's hold."""
        if not self.applied or self.choices is None:
            return {}
        return {c.name: c.value for c in self.choices.settings if _usable(c)}

    @property
    def expected(self) -> dict[str, float]:
        """What vLLM should print at its start; empty where nothing was sized."""
        if self.sizing is None:
            return {}
        return {
            "weights_gib": round(self.sizing.weights_gib, 3),
            "kv_cache_gib": round(self.sizing.kv_cache_gib, 3),
            "kv_cache_tokens": self.sizing.kv_cache_tokens,
            "max_concurrency": round(self.sizing.max_concurrency, 2),
            "max_model_len": self.sizing.max_model_len,
        }


@dataclass(frozen=True)
class HostView:
    """One host: what it is, and what it is to carry."""

    spec: HostSpec
    state: HostState
    seen: Seen
    verdicts: tuple[Verdict, ...]
    decided: Decided
    cards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by instance
    sized: Mapping[str, Sized] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Why nothing may be changed on this host, each with its remedy."""
        found = [f"{self.spec.name}: {v}" for v in self.verdicts if v.level == "refused"]
        found += self.decided.reasons
        for name, one in self.sized.items():
            found += [f"{self.spec.name}: instance {name}: {reason}" for reason in one.reasons]
        return found

    @property
    def notices(self) -> list[str]:
        """What is odd and stops nothing."""
        found = [f"{v.what}: {v}" for v in self.verdicts if v.level == "warning"]
        found += self.decided.notices
        for name, one in self.sized.items():
            found += [f"instance {name}: {warning}" for warning in one.warnings if one.applied]
        return found


def survey(fleet: Fleet, states: Mapping[str, HostState], inputs: Inputs) -> dict[str, HostView]:
    """The view of every host that gave facts, in declared order."""
    stamps = stamps_of(states)
    return {
        spec.name: survey_host(spec, states[spec.name], stamps, inputs)
        for spec in fleet.hosts
        if spec.name in states
    }


def survey_host(spec: HostSpec, state: HostState, stamps: Stamps, inputs: Inputs) -> HostView:
    """One host; ``stamps`` of all, since weights on one tell what another will load."""
    written = {
        name: placed.cards
        for (host, name), placed in inputs.placement.lines.items()
        if host == spec.name
    }
    cardless = spec.settings.device == "cpu" or "gpu" not in spec.groups
    if cardless or not manageable(state):
        return HostView(spec, state, Seen(), examine(spec, state, {}, inputs), Decided())
    wanted = cards_wanted(spec, written)
    seen = look(spec, state, wanted)
    uuids = {card.index: card.uuid for card in seen.cards}
    found = None if seen.problems else seen.groups
    decided = decide(spec, inputs.placement, found, uuids)
    placed = {name: one.cards for name, one in decided.lines.items()}
    cards = cards_wanted(spec, placed)
    verdicts = examine(spec, state, placed, inputs, seen if cards == wanted else None)
    sized = {}
    known = seen.by_index
    for one in spec.instances:
        its = [known[i] for i in cards[one.name] if i in known]
        if its and len(its) == len(cards[one.name]):
            sized[one.name] = fit(spec, one, its, _link(cards[one.name], seen), stamps, inputs)
    return HostView(spec, state, seen, verdicts, decided, cards, sized)


def lines_of(views: Mapping[str, HostView]) -> dict[tuple[str, str], Placed]:
    """Lines of the placement file that these views would add or change."""
    return {
        (host, name): view.decided.lines[name]
        for host, view in views.items()
        for name in view.decided.new
    }


def _link(indices: Sequence[int], seen: Seen) -> str:
    """The slowest link in the words of sizing; "" where it is not known."""
    if len(indices) == 1:
        return "nvlink"
    word = worst_link(indices, seen.topology)
    return LINKS.get("NV" if re.fullmatch(r"NV\d+", word) else word, "")


# -- memory


def fit(
    spec: HostSpec,
    one: Instance,
    cards: Sequence[Card],
    link: str,
    stamps: Stamps,
    inputs: Inputs,
) -> Sized:
    """Settings and memory of one instance on its cards.

    Chosen settings are used only where the config.json lies beside group_vars: one that is
    found on a host appears with the first deploy, and using it would change the second.
    """
    model, version = spec.settings.models[one.model], version_of(spec, one)
    if spec.settings.device != "cuda":
        return Sized(why_not="sizing knows NVIDIA cards only")
    try:
        config, source = config_of(spec, one, stamps, inputs)
    except SizingError as error:
        return Sized(why_not=str(error))
    if config is None:
        return Sized(
            why_not="its config.json is not known here: `fleet plan --fetch-configs` fetches it "
            f"as {config_path(one.model, model)}"
        )
    given, count = dict(given_options(one.model, model, one)), len(cards)
    if isinstance(one, Rank) and one.span is not None:
        # One server on the like cards of all its hosts.
        try:
            tensor, stages = degrees(one.span, len(one.hosts), count)
        except ValueError as error:
            return Sized(source, why_not=str(error), reasons=(str(error),))
        given["tensor-parallel-size"], given["pipeline-parallel-size"] = tensor, stages
        if one.span.data_parallel > 1:
            given["data-parallel-size"] = one.span.data_parallel
        count *= len(one.hosts)
    sized = _fit(
        json.dumps(config),
        source,
        source == config_path(one.model, model),
        cards[0].name,
        min((c.memory_mib or 0) for c in cards),
        count,
        link,
        version,
        model.max_model_len,
        Traffic(**model.traffic.model_dump()),
        model.repo,
        model.task,
        json.dumps(given),
    )
    if sized.sizing is None or not model.adapters:
        return sized
    return replace(sized, warnings=(*sized.warnings, *_adapters(model)))


@lru_cache(maxsize=1024)  # most instances of a large fleet are like others
def _fit(
    config_text: str,
    source: str,
    applied: bool,
    card: str,
    card_mib: int,
    count: int,
    link: str,
    version: str,
    max_model_len: int | str,
    traffic: Traffic,
    repo: str,
    task: Task,
    given_text: str,
) -> Sized:
    """Settings and memory of an instance on so many cards of one kind."""
    config, given = json.loads(config_text), json.loads(given_text)
    problem = architecture_problem(version, config, given)
    if problem:
        return Sized(source, why_not=problem, reasons=(problem,) if applied else ())
    if not link and applied and not {"tensor-parallel-size", "tensor_parallel_size"} & set(given):
        # Guessing would give other settings, and a restart, whenever one look at a host fails.
        unknown = (
            "how its cards are linked is not known, and its settings follow from that: see what "
            "`nvidia-smi topo -m` says on the host, or set tensor-parallel-size in vllm_args"
        )
        return Sized(source, why_not=unknown, reasons=(unknown,))
    try:
        gpu = gpu_from_smi(card, card_mib)
        own = engine.options(given)
        if isinstance(max_model_len, int):
            own.setdefault("max-model-len", max_model_len)
        choices = choose(
            config,
            gpu,
            count,
            links=link or "sys",
            traffic=traffic,
            repo=repo,
            vllm_version=version,
            task=task,
            given=own,
        )
        sizing = choices.sizing if applied else _as_is(config, gpu, count, version, own, task)
    except SizingError as error:
        refused = applied and isinstance(error, RefusedError)
        return Sized(source, why_not=str(error), reasons=(str(error),) if refused else ())
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        return Sized(source, why_not=f"it cannot be sized with these vllm_args: {error}")
    dropped = _refused(choices.settings, version)
    if dropped:
        settings = tuple(c for c in choices.settings if c.name not in dropped)
        choices = replace(choices, settings=settings)
    return Sized(
        source,
        sizing=sizing,
        choices=choices,
        applied=applied,
        total_gib=gpu.gib,
        reasons=choices.refusals if applied else (),
        warnings=choices.warnings,
    )


def stamps_of(states: Mapping[str, HostState]) -> Stamps:
    """The stamps of weights that are whole and have their config.json, by path and host."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, state in states.items():
        for path, stamp in state.weights.items():
            if stamp.get("intact") and stamp.get("config"):
                found.setdefault(path, {})[name] = stamp
    return found


def _adapters(model: Model) -> tuple[str, ...]:
    """What the figures leave out."""
    count = len(model.adapters)
    named = f"{count} LoRA adapter{'s' if count > 1 else ''}"
    return (f"memory of its {named} is not in these figures: leave some of each card free",)


def config_of(
    spec: HostSpec, one: Instance, stamps: Stamps, inputs: Inputs
) -> tuple[dict[str, Any] | None, str]:
    """config.json of an instance's model and where it is from: beside group_vars, or a host."""
    model = spec.settings.models[one.model]
    path = config_path(one.model, model)
    if path in inputs.configs:
        return dict(inputs.configs[path]), path
    stamp = weights.wanted(one.model, model)
    there = stamps.get(stamp.stamp, {})
    for name in sorted(there, key=lambda name: name != spec.name):  # its own host's first
        found = there[name]
        if any(found.get(key) != value for key, value in stamp.identity.items()):
            continue
        return merged_config(found["config"], found.get("quant"), f"{name}:{stamp.directory}"), (
            f"the weights on {name}"
        )
    return None, ""


def merged_config(text: str, quant: str | None, where: str) -> dict[str, Any]:
    """config.json with hf_quant_config.json in it. Raises SizingError where it is no JSON."""
    try:
        config = parsed(text)
        inner = parsed(quant) if quant else None
    except ValueError as error:
        raise SizingError(f"{where}: config.json is not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise SizingError(f"{where}: config.json must hold a JSON object")
    if isinstance(inner, dict) and "quantization_config" not in config:
        inner = inner.get("quantization", inner)
        config["quantization_config"] = {"quant_method": "modelopt", **inner}
    return config


def _as_is(
    config: Mapping[str, Any],
    gpu: Any,
    count: int,
    version: str,
    given: Mapping[str, Any],
    task: str,
) -> Sizing:
    """The sizing of what runs where no setting is chosen: the operator's, else vLLM's own."""
    asked = options.given(given, task)
    pp = options.number(given, "pipeline-parallel-size") or 1
    tp = options.number(given, "tensor-parallel-size")
    return size(
        config,
        gpu=gpu,
        tp=tp or max(count // (pp * int(asked["dp"])), 1),
        pp=pp,
        vllm_version=version,
        gpu_memory_utilization=options.share(
            given,
            "gpu-memory-utilization",
            engine_data.nearest(version).gpu_memory_utilization,
        ),
        max_model_len=options.length(given),
        max_num_seqs=options.number(given, "max-num-seqs"),
        max_num_batched_tokens=options.number(given, "max-num-batched-tokens"),
        kv_cache_dtype=str(given.get("kv-cache-dtype") or "auto"),
        dtype=str(given.get("dtype") or "auto"),
        **asked,
    )


def _usable(choice: Choice) -> bool:
    """Whether a setting is one of ours to pass on; vLLM finds the quantisation by itself."""
    return choice.by == "plan" and choice.value is not None and choice.name != "quantization"


def _refused(settings: Sequence[Choice], version: str) -> set[str]:
    """Names of the chosen options that this version does not take as they are."""
    words = {
        c.name: [w for line in engine.option_words(c.name, c.value) for w in line]
        for c in settings
        if c.value is not None and c.name != "quantization"
    }
    together = set(check_args(version, [w for its in words.values() for w in its]))
    return {
        c.name
        for c in settings
        if _usable(c) and together & set(check_args(version, words[c.name]))
    }
