"""Settings for a model on given cards, each with its reason.

An operator's own value always wins; it is checked like a chosen one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import options
from .core import Sizing, size
from .errors import RefusedError, SizingError
from .gpus import Gpu
from .models import build
from .quant import Quantisation, quantisation
from .rules import DEFAULT_VERSION, parse_version, rules

#: links over which TP is worth its all-reduces, best first
TENSOR_LINKS = ("nvswitch", "nvlink", "nv")
#: context steps that "auto" rounds to
STEP = 1024
#: a context that a layout must hold to be worth taking, where no traffic is given
USEFUL = 8192


@dataclass(frozen=True)
class Traffic:
    """What requests look like. Tokens; ``concurrent`` requests at once."""

    mean_in: int | None = None
    mean_out: int | None = None
    longest: int | None = None
    concurrent: int = 16


@dataclass(frozen=True)
class Choice:
    """One setting."""

    name: str
    value: Any
    reason: str
    by: str = "plan"  # plan or operator


@dataclass(frozen=True)
class Choices:
    """All settings of one server, what they give, and what speaks against them."""

    settings: tuple[Choice, ...]
    sizing: Sizing | None
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tried: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, or None."""
        return next((c.value for c in self.settings if c.name == name), None)

    def vllm_args(self) -> dict[str, Any]:
        """Options of ``vllm serve`` by long name; what equals vLLM's default is left out."""
        return {
            c.name: c.value
            for c in self.settings
            if c.value is not None and c.name not in ("quantization",)
        }


#: Parsers by family of names, with the version from which vLLM has them.
#: (pattern on the repository or architecture, reasoning parser, tool parser)
PARSERS: tuple[tuple[str, str | None, str | None], ...] = (
    (r"glm-?(5|4\.7)|glmmoedsa|glm4moelite", "glm47", "glm47"),
    (r"glm-?4\.[56]|glm4moe|glm4vmoe", "glm45", "glm45"),
    (r"qwen3-?coder", None, "qwen3_coder"),
    (r"qwen3\.[5-9]|qwen3_5", "qwen3", "qwen3_coder"),
    (r"qwen3-?next.*thinking|qwen3.*thinking", "qwen3", "hermes"),
    (r"qwen3.*instruct", None, "hermes"),
    (r"qwen3", "qwen3", "hermes"),
    (r"qwq", "deepseek_r1", "hermes"),
    (r"gemma-?4", "gemma4", "gemma4"),
    (r"qwen2", None, "hermes"),
    (r"deepseek-?v3\.?2", "deepseek_v3", "deepseek_v32"),
    (r"deepseek-?v3\.?1", "deepseek_v3", "deepseek_v31"),
    (r"deepseek-?v3", "deepseek_v3", "deepseek_v3"),
    (r"gpt-?oss", "openai_gptoss", "openai"),
    (r"kimi-?k2.*thinking", "kimi_k2", "kimi_k2"),
    (r"kimi-?k2", None, "kimi_k2"),
    (r"minimax-?m2", "minimax_m2", "minimax_m2"),
)


def parsers(repo: str, architecture: str, vllm_version: str) -> tuple[str | None, str | None]:
    """Reasoning and tool parser of a model, or None where it needs none."""
    minor = parse_version(vllm_version)
    for text in (repo, architecture):
        for pattern, reasoning, tool in PARSERS:
            if re.search(pattern, text.lower()):
                if reasoning == "glm47" and minor < (0, 24):
                    reasoning = "glm45"  # the parser of its own came later; same tags
                return reasoning, tool
    return None, None


def refusals(
    config: Mapping[str, Any],
    gpu: Gpu,
    *,
    vllm_version: str = DEFAULT_VERSION,
    driver: str | None = None,
    glibc: tuple[int, int] | None = None,
    dtype: str = "auto",
) -> list[str]:
    """Why this version of vLLM cannot serve this model on this card and host. Empty: it can."""
    out = []
    minor = parse_version(vllm_version)
    capability = gpu.capability
    shown = f"sm_{capability[0]}{capability[1]}"
    if gpu.known and capability < (7, 5) and minor >= (0, 20):
        out.append(
            f"{gpu.name} ({shown}): the default wheels have no kernels for it since vLLM 0.20; "
            "use 0.19 or other cards"
        )
    if driver is not None and minor >= (0, 20):
        match = re.match(r"(\d+)", driver)
        if match is None:
            out.append(f"driver {driver!r}: not a version")
        elif int(match[1]) < 580:
            out.append(
                f"driver {driver}: vLLM {vllm_version} is built for CUDA 13, which needs 580 or "
                "later; update the driver, or use the cu129 variant"
            )
    if glibc is not None:
        needed = (
            (2, 31)
            if minor < (0, 20)
            else (2, 35)
            if minor == (0, 20)
            else (2, 24)
            if minor == (0, 21)
            else (2, 28)
        )
        if glibc < needed:
            out.append(
                f"glibc {glibc[0]}.{glibc[1]}: the wheel of vLLM {vllm_version} needs "
                f"{needed[0]}.{needed[1]} or later"
            )
    quant = quantisation(config)
    kinds = _kinds(quant)
    if "fp8" in kinds and capability < (7, 5):
        out.append(f"{shown}: FP8 weights need sm_75 or later (Marlin)")
    if "nvfp4" in kinds and capability < (7, 5):
        out.append(f"{shown}: NVFP4 weights need sm_75 or later (Marlin)")
    if quant.method.startswith("awq") and capability < (7, 5):
        out.append(f"{shown}: AWQ weights need sm_75 or later")
    if "mxfp4" in kinds and capability < (8, 0):
        out.append(f"{shown}: MXFP4 weights need sm_80 or later")
    model = build(config)
    if model.indexed and capability[0] not in (9, 10, 12):
        out.append(
            f"{shown}: sparse attention (DSA) of {model.architecture} needs Hopper or Blackwell"
        )
    elif model.indexed and capability[0] == 12 and not rules(vllm_version).packs_sparse_keys:
        out.append(
            f"{shown}: sparse attention (DSA) of {model.architecture} runs on it from vLLM 0.24 on"
        )
    wanted = model.dtype if dtype == "auto" else dtype
    if "bfloat16" in wanted and capability < (8, 0) and dtype != "auto":
        out.append(f"{shown} has no bfloat16: use dtype half")
    return out


def _kinds(quant: Quantisation) -> set[str]:
    schemes = [quant.default, quant.experts, *quant.named.values()]
    return {s.kind for s in schemes if s is not None}


def splits(config: Mapping[str, Any], count: int, links: str) -> list[tuple[int, int, str]]:
    """(TP, PP, why) worth trying on ``count`` cards, best first."""
    model = build(config)
    fits = [
        tp
        for tp in range(1, count + 1)
        if count % tp == 0
        and all(not n or n % tp == 0 for what, n in model.divide if "KV" not in what)
    ]
    fast = links.lower().startswith(TENSOR_LINKS)
    out = []
    for tp in sorted(fits, reverse=fast):
        pp = count // tp
        if pp > len(model.layers):
            continue
        if tp == 1 and pp == 1:
            why = "one card"
        elif pp == 1:
            why = (
                f"TP {tp}: the cards are linked by {links}, which carries its all-reduces"
                if fast
                else f"TP {tp} over {links}: its all-reduces will be slow"
            )
        elif tp == 1:
            why = f"PP {pp}: {links} between the cards is too slow for TP"
        else:
            why = f"TP {tp} x PP {pp}: TP {count} does not divide the heads"
            if fast and count in fits:
                why = f"TP {tp} x PP {pp}: the wider TP leaves less memory"
            elif not fast:
                why = f"TP {tp} x PP {pp}: little traffic over {links}"
        out.append((tp, pp, why))
    return out


def choose(
    config: Mapping[str, Any],
    gpu: Gpu,
    count: int,
    *,
    links: str = "nvlink",
    traffic: Traffic | None = None,
    repo: str = "",
    vllm_version: str = DEFAULT_VERSION,
    task: str = "chat",
    given: Mapping[str, Any] | None = None,
    driver: str | None = None,
    glibc: tuple[int, int] | None = None,
    used_gib: float = 0.0,
) -> Choices:
    """Chooses the settings of one server on ``count`` like cards.

    ``links``: nvswitch, nvlink, pcie-switch, host-bridge, numa, sys. ``given``: the operator's
    own options of ``vllm serve`` by long name, which win. Raises SizingError for what cannot be
    sized; what cannot be served is in ``refusals``.
    """
    traffic = traffic or Traffic()
    own = dict(given or {})
    model = build(config)
    quant = quantisation(config, own.get("quantization"))
    settings: list[Choice] = []
    no = refusals(
        config,
        gpu,
        vllm_version=vllm_version,
        driver=driver,
        glibc=glibc,
        dtype=str(own.get("dtype", "auto")),
    )
    warnings: list[str] = []
    tried: list[str] = []

    def pick(name: str, value: Any, reason: str) -> Any:
        if name in own:
            settings.append(Choice(name, own[name], "set by the operator", "operator"))
            return own[name]
        settings.append(Choice(name, value, reason))
        return value

    dtype = "auto"
    if "bfloat16" in model.dtype and gpu.capability < (8, 0):
        dtype = pick("dtype", "half", f"{gpu.name} has no bfloat16")
    elif "dtype" in own:
        dtype = pick("dtype", None, "")
    pick("gpu-memory-utilization", *_utilization(gpu, used_gib, model.indexed))
    utilization = options.share(own, "gpu-memory-utilization", settings[-1].value)
    seqs = options.number(own, "max-num-seqs")
    batched = options.number(own, "max-num-batched-tokens")
    length_own = options.length(own)
    wanted, why_length = _wanted_length(length_own, traffic, model.max_len)
    asked_for = options.given(own, task)
    warnings += options.warnings(own)

    layouts = _layouts(config, count, links, own)
    if not layouts:
        raise SizingError(
            f"{model.architecture} cannot be divided over {count} cards: no TP divides its heads."
        )

    def sized(tp: int, pp: int, kv: str, length: int | None) -> Sizing:
        return size(
            config,
            gpu=gpu,
            tp=tp,
            pp=pp,
            vllm_version=vllm_version,
            gpu_memory_utilization=utilization,
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            kv_cache_dtype=kv,
            dtype=str(dtype or "auto"),
            used_gib=used_gib,
            **asked_for,
        )

    kv_options: Sequence[str] = ["auto"]
    if "kv-cache-dtype" in own:
        kv_options = [str(own["kv-cache-dtype"])]
    elif gpu.capability >= (8, 9) and quant.kv_cache is None:
        kv_options = ["auto", "fp8"]
    # Known traffic must fit as asked; else any useful context will do, and is fitted below.
    fixed = bool(traffic.longest or traffic.mean_in or length_own)
    need = wanted if fixed else min(wanted, USEFUL)
    asked = traffic.concurrent if fixed and not length_own else 1
    best: tuple[int, int, str, str, Sizing] | None = None
    refused = True
    for kv in kv_options:
        for tp, pp, why in layouts:
            try:
                found = sized(tp, pp, kv, need)
            except SizingError as error:
                tried.append(f"TP {tp} PP {pp}: {error}")
                refused = refused and isinstance(error, RefusedError)
                continue
            good = found.fits and _holds(found, traffic) >= asked
            if (
                good
                or best is None
                or (found.fits and not best[4].fits)
                or (found.fits and _holds(found, traffic) > 1.1 * _holds(best[4], traffic))
            ):
                best = (tp, pp, kv, why, found)
            if good:
                break
            tried.append(
                f"TP {tp} PP {pp}, KV {kv}: "
                + (
                    found.reason
                    or f"{_holds(found, traffic):.1f} requests at once, {asked} are asked for"
                )
            )
        if best is not None and best[4].fits and _holds(best[4], traffic) >= asked:
            break
    if best is None:
        kind = RefusedError if refused else SizingError
        raise kind("; ".join(dict.fromkeys(one.rstrip(".") for one in tried)) + ".")
    tp, pp, kv, why, found = best
    if need != wanted:
        found = sized(tp, pp, kv, wanted)
    pick("tensor-parallel-size", tp, why)
    if pp > 1 or "pipeline-parallel-size" in own:
        pick("pipeline-parallel-size", pp, why)

    length = wanted
    if length_own:
        pick("max-model-len", wanted, "")
    else:
        length, why_length = _fit_length(
            lambda n: sized(tp, pp, kv, n), found, wanted, traffic, why_length
        )
        pick("max-model-len", length, why_length)
    final = sized(tp, pp, kv, length) if length != wanted else found
    if kv != "auto" or "kv-cache-dtype" in own:
        pick(
            "kv-cache-dtype",
            kv,
            f"FP8 keys and values hold about twice the tokens; in {model.dtype} the asked traffic "
            "does not fit",
        )
    pick("max-num-seqs", *_seqs(final, traffic, task, model.hybrid))
    seqs = seqs or settings[-1].value
    pick("max-num-batched-tokens", *_batched(final))
    batched = batched or settings[-1].value
    settings.append(
        Choice(
            "quantization",
            quant.method,
            "as the weights are; vLLM finds it by itself, and the option is left out",
        )
    )
    if task == "chat":
        reasoning, tool = parsers(repo, model.architecture, vllm_version)
        if tool is not None or "tool-call-parser" in own:
            pick("tool-call-parser", tool, f"the tool format of {repo or model.architecture}")
            pick("enable-auto-tool-choice", True, "tools are refused without it")
        if reasoning is not None or "reasoning-parser" in own:
            pick(
                "reasoning-parser",
                reasoning,
                f"separates the reasoning of {repo or model.architecture} from its answer",
            )
    known = {c.name for c in settings}
    settings += [
        Choice(name, value, "set by the operator", "operator")
        for name, value in own.items()
        if name not in known
    ]
    after = sized(tp, pp, kv, length)  # of the settings as chosen: what is shown is what is set
    if not after.fits:
        no.append(after.reason)
    warnings += after.warnings
    return Choices(tuple(settings), after, tuple(no), tuple(warnings), tuple(tried))


def _layouts(
    config: Mapping[str, Any], count: int, links: str, own: Mapping[str, Any]
) -> list[tuple[int, int, str]]:
    """(TP, PP, why) to try: as the operator says, and over the cards that this leaves."""
    tp, pp, data = (
        options.number(own, f"{one}-parallel-size") for one in ("tensor", "pipeline", "data")
    )
    sizes = [1 if size is None else size for size in (tp, pp, data)]
    fixed = math.prod(sizes)
    if min(sizes) < 1 or count % fixed or (tp and pp and fixed != count):
        raise RefusedError(
            f"tensor- x pipeline- x data-parallel-size {' x '.join(map(str, sizes))} does not "
            f"divide the {count} cards; change `cards` or these options."
        )
    if tp or pp:
        rest = count // fixed
        return [(tp or rest, pp or rest, "set by the operator, over all cards")]
    return splits(config, count // fixed, links)


def _utilization(gpu: Gpu, used_gib: float, indexed: bool) -> tuple[float, str]:
    """The share of the card: most of it, less what others hold and what grows after the start."""
    share = 0.92 if gpu.gib >= 40 else 0.9
    why = f"of {gpu.gib:.1f} GiB; the rest is for the CUDA context and what grows after the start"
    if indexed:
        share, why = 0.88, "sparse attention takes work space after the start"
    if gpu.unified:
        share, why = 0.7, "the system shares this memory"
    free = (gpu.gib - used_gib - 0.3) / gpu.gib
    if used_gib > 0 and free < share:
        share = int(free * 100) / 100
        why = f"{used_gib:.1f} GiB of the card are held by others"
    return share, why


def _holds(found: Sizing, traffic: Traffic) -> float:
    """Requests that the KV cache holds: of the mean length where it is known, else the longest."""
    mean = (traffic.mean_in or 0) + (traffic.mean_out or 0)
    if mean:
        return found.kv_cache_tokens / mean
    return found.max_concurrency


def _wanted_length(own: int | None, traffic: Traffic, most: int) -> tuple[int, str]:
    if own:
        return own, "set by the operator"
    if traffic.longest:
        length = min(-(-traffic.longest // STEP) * STEP, most)
        return length, f"the longest request, {traffic.longest} tokens, rounded up"
    if traffic.mean_in or traffic.mean_out:
        mean = (traffic.mean_in or 0) + (traffic.mean_out or 0)
        length = min(max(-(-3 * mean // STEP) * STEP, 4 * STEP), most)
        return length, f"three times the mean request of {mean} tokens"
    return most, "the longest that the model knows"


def _fit_length(
    sized: Any, found: Sizing, wanted: int, traffic: Traffic, why: str
) -> tuple[int, str]:
    """Keeps ``wanted`` when it fits; else the largest that keeps the asked concurrency."""
    if found.fits and (
        found.max_concurrency >= traffic.concurrent or traffic.longest or traffic.mean_in
    ):
        return wanted, why
    low, high = STEP, wanted
    while high - low >= STEP:
        middle = (low + high + STEP) // 2 // STEP * STEP
        if middle in (low, high):
            break
        trial: Sizing = sized(middle)
        if trial.fits and trial.max_concurrency >= traffic.concurrent:
            low = middle
        else:
            high = middle
    trial = sized(low)
    if trial.fits and trial.max_concurrency >= traffic.concurrent:
        return low, f"the largest that keeps {traffic.concurrent} requests at once"
    if found.max_model_len_max >= STEP:
        longest = min(wanted, found.max_model_len_max // STEP * STEP)
        return longest, (
            f"the longest that fits; {traffic.concurrent} such requests at once do not"
        )
    return wanted, why


def _seqs(found: Sizing, traffic: Traffic, task: str, hybrid: bool) -> tuple[int, str]:
    """Sequences of a step: what KV can hold of mean requests, up to vLLM's own default."""
    default = int(found.settings["max_num_seqs"])
    if task != "chat":
        return default, "vLLM's default; no KV cache limits it"
    mean = (traffic.mean_in or 0) + (traffic.mean_out or 0)
    mean = mean or max(found.max_model_len // 8, 512)
    holds = max(found.kv_cache_tokens // max(mean, 1), 1)
    wanted = max(16, min(default, 1 << (int(holds).bit_length())))
    if hybrid:
        wanted = max(min(wanted, found.blocks // 4), 1)
    wanted = min(wanted, int(found.settings["max_num_batched_tokens"]))
    if wanted >= default:
        return default, f"vLLM's default; the KV cache holds {holds} requests of {mean} tokens"
    return wanted, f"the KV cache holds {holds} requests of {mean} tokens; more would be preempted"


def _batched(found: Sizing) -> tuple[int, str]:
    tokens = int(found.settings["max_num_batched_tokens"])
    return tokens, (
        "tokens of one step: vLLM's default for this card; more speeds up long prompts and takes "
        "activation memory"
    )
