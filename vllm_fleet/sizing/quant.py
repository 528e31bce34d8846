"""Bytes of a weight shard under each quantisation that vLLM loads.

From vllm/model_executor/layers/quantization: fp8.py, gptq_marlin.py, awq_marlin.py,
modelopt.py, mxfp4.py and compressed_tensors/.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .errors import RefusedError, SizingError
from .kvcache import cdiv


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored. ``kind``: none, fp8, int, int8, nvfp4, mxfp4."""

    kind: str = "none"
    bits: int = 16
    group: int | None = None  # along the input
    block: tuple[int, int] | None = None  # fp8: rows and columns of one scale
    per_row: bool = False  # fp8: a scale for each output row
    zeros: bool = False

    def weight_bytes(self, out: int, inner: int, element: float) -> float:
        """Bytes of an [out, inner] shard on the card, with its scales."""
        if self.kind == "none":
            return out * inner * element
        if self.kind == "fp8":
            if self.block:
                return out * inner + 4 * cdiv(out, self.block[0]) * cdiv(inner, self.block[1])
            return out * inner + (4 * out if self.per_row else 4)
        if self.kind == "int8":
            return out * inner + 4 * out
        if self.kind == "int":
            rows = 1 if not self.group or self.group < 0 else cdiv(inner, self.group)
            scales = rows * out * 2
            zeros = rows * out * self.bits / 8 if self.zeros else 0
            return out * inner * self.bits / 8 + scales + zeros
        if self.kind == "nvfp4":
            # Block scales are swizzled to tiles of 128 rows and 4 columns.
            columns = cdiv(inner, self.group or 16)
            return out * inner / 2 + cdiv(out, 128) * 128 * cdiv(columns, 4) * 4 + 8
        if self.kind == "mxfp4":
            return out * inner / 2 + out * cdiv(inner, 32)
        if self.kind == "mxfp8":
            return out * inner + out * cdiv(inner, 32)
        raise SizingError(f"quantisation kind {self.kind!r} is not known")


PLAIN = Scheme()


@lru_cache(maxsize=16384)
def _bare(name: str) -> str:
    """A module name without the wrappers that differ between checkpoint and vLLM."""
    name = re.sub(r"^(model|language_model|transformer|encoder)\.", "", name)
    previous = None
    while previous != name:
        previous = name
        name = re.sub(r"^(model|language_model|transformer|encoder)\.", "", name)
    return name.replace("in_proj_qkvz", "in_proj_qkv")


@dataclass(frozen=True)
class Quantisation:
    """A model's quantisation: which scheme a module has."""

    method: str = "none"
    default: Scheme = PLAIN
    experts: Scheme | None = None  # when experts differ from linear layers
    named: Mapping[str, Scheme] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    head: Scheme = PLAIN
    kv_cache: str | None = None  # what kv-cache-dtype auto becomes
    plain_vision: bool = False

    def scheme(self, name: str, role: str) -> Scheme:
        """The scheme of a module by its checkpoint name and role."""
        if role in ("plain", "embedding"):
            return PLAIN
        bare = _bare(name)
        if role == "head":
            return self.named.get(bare, self.head)
        if bare in self.named:
            return self.named[bare]
        if self.plain_vision and bare.startswith(("visual", "vision")):
            return PLAIN
        if self._ignores(bare):
            return PLAIN
        if role == "expert" and self.experts is not None:
            return self.experts
        return self.default

    def _ignores(self, bare: str) -> bool:
        for pattern in self.ignored:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], bare) or re.match(pattern[3:], f"model.{bare}"):
                    return True
            elif "*" in pattern:
                if fnmatch.fnmatchcase(bare, pattern):
                    return True
            elif (
                bare == pattern
                or bare.startswith(f"{pattern}.")
                or ("." not in pattern and pattern in bare.split("."))
            ):
                return True
        return False


def quantisation(
    config: Mapping[str, Any],
    override: str | None = None,
    where: str = "config.json",
) -> Quantisation:
    """The quantisation of a config, or of ``--quantization`` for a plain one.

    Raises SizingError for methods that are not known.
    """
    data = config.get("quantization_config")
    text = config.get("text_config")
    if data is None and isinstance(text, Mapping):
        data = text.get("quantization_config")
    if data is None:
        data = config.get("compression_config")
    if data is None:
        return _runtime(override)
    if not isinstance(data, Mapping):
        raise SizingError(f"{where}: quantization_config: a mapping is wanted, not {data!r}.")
    method = str(data.get("quant_method", "")).lower()
    place = f"{where}: quantization_config"
    if override and override.lower() not in _same(method, data):
        raise RefusedError(
            f"{place}: the weights are {method or 'quantised'}, but --quantization is "
            f"{override}; vLLM refuses that. Leave --quantization out."
        )
    ignored = _ignored(data, place)
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(data, ignored, place)
    if method in ("gptq", "gptq_marlin", "awq", "awq_marlin"):
        return _integer(data, method, ignored, place)
    if method == "mxfp4" or method == "gpt_oss_mxfp4":
        return Quantisation("mxfp4", PLAIN, Scheme("mxfp4", 4, 32), ignored=ignored)
    if method.startswith("modelopt") or (not method and "quant_algo" in data):
        return _modelopt(data, ignored, place)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(data, ignored, place)
    raise SizingError(
        f"{place}: quant_method {method or None!r} is not known to this planner; known are fp8, "
        "gptq, awq, modelopt (FP8, NVFP4), mxfp4 and compressed-tensors."
    )


def _ignored(data: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Names of modules that stay as they are, from whichever key has them."""
    names: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        entries = data.get(key) or []
        if not isinstance(entries, list):
            raise SizingError(f"{place}: {key}: a list of names is wanted, not {entries!r}.")
        names += [n if n.startswith("re:") else _bare(n) for n in map(str, entries)]
    return tuple(names)


def _same(method: str, data: Mapping[str, Any]) -> set[str]:
    algo = str(data.get("quant_algo", "")).lower()
    names = {method, f"{method}_marlin", method.removesuffix("_marlin")}
    if method.startswith("modelopt"):
        names |= {"modelopt", "modelopt_fp4", "modelopt_mixed", f"modelopt_{algo}"}
    if method == "mxfp4":
        names.add("gpt_oss_mxfp4")
    return names


def _runtime(override: str | None) -> Quantisation:
    """``--quantization`` on a plain checkpoint: only fp8 is made while loading."""
    if override is None:
        return Quantisation()
    if override in ("fp8", "fp8_per_tensor"):
        return Quantisation("fp8", Scheme("fp8", 8))
    if override == "fp8_per_block":
        return Quantisation("fp8", Scheme("fp8", 8, block=(128, 128)))
    raise SizingError(
        f"--quantization {override}: the weights are not quantised, and only fp8 is made while "
        "loading. Use a checkpoint that is quantised, or leave the option out."
    )


def _fp8(data: Mapping[str, Any], ignored: tuple[str, ...], place: str) -> Quantisation:
    block = data.get("weight_block_size")
    if block is None:
        return Quantisation("fp8", Scheme("fp8", 8), ignored=ignored)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(b, int) and b > 0 for b in block)
    ):
        raise SizingError(f"{place}: weight_block_size: two whole numbers, not {block!r}.")
    return Quantisation("fp8", Scheme("fp8", 8, block=(block[0], block[1])), ignored=ignored)


def _whole(data: Mapping[str, Any], place: str, *names: str) -> int:
    for name in names:
        value = data.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise SizingError(f"{place}: {names[0]} (or {', '.join(names[1:])}) is missing.")


def _integer(
    data: Mapping[str, Any], method: str, ignored: tuple[str, ...], place: str
) -> Quantisation:
    bits = _whole(data, place, "bits", "w_bit")
    group = _whole(data, place, "group_size", "q_group_size")
    awq = method.startswith("awq")
    symmetric = bool(data.get("sym", not awq)) and not (awq and data.get("zero_point", True))
    scheme = Scheme("int", bits, group, zeros=not symmetric)
    head = scheme if data.get("lm_head") is True else PLAIN
    return Quantisation(method, scheme, ignored=ignored, head=head, plain_vision=True)


_ALGORITHMS = {
    "FP8": Scheme("fp8", 8),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", 8, per_row=True),
    "FP8_PB_WO": Scheme("fp8", 8, block=(128, 128)),
    "NVFP4": Scheme("nvfp4", 4, 16),
    "W4A16_NVFP4": Scheme("nvfp4", 4, 16),
    "MXFP8": Scheme("mxfp8", 8, 32),  # one byte each and a shared exponent
}


def _modelopt(data: Mapping[str, Any], ignored: tuple[str, ...], place: str) -> Quantisation:
    algo = str(data.get("quant_algo", "")).upper()
    kv = _modelopt_kv(data)
    layers = data.get("quantized_layers")
    if layers is not None and not isinstance(layers, Mapping):
        raise SizingError(f"{place}: quantized_layers: a mapping is wanted, not {layers!r}.")
    if algo == "MIXED_PRECISION" or layers is not None:
        named = {}
        for name, entry in (layers or {}).items():
            kind = str(entry.get("quant_algo", "")).upper() if isinstance(entry, Mapping) else ""
            if kind not in _ALGORITHMS:
                raise SizingError(
                    f"{place}: quantized_layers: {name}: algorithm {kind!r} is not known."
                )
            named[_bare(str(name))] = _ALGORITHMS[kind]
        return Quantisation("modelopt", PLAIN, named=named, ignored=ignored, kv_cache=kv)
    if algo not in _ALGORITHMS:
        raise SizingError(f"{place}: quant_algo {algo or None!r} is not known.")
    return Quantisation("modelopt", _ALGORITHMS[algo], ignored=ignored, kv_cache=kv)


def _modelopt_kv(data: Mapping[str, Any]) -> str | None:
    """torch_utils.get_kv_cache_quant_algo_string"""
    scheme = data.get("kv_cache_scheme") or data.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        if scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return "fp8"
        if scheme.get("num_bits") == 4 and scheme.get("type") == "float":
            return "nvfp4"
        return None
    if isinstance(scheme, str) and scheme.lower() in ("fp8", "fp8_e4m3", "nvfp4"):
        return "nvfp4" if scheme.lower() == "nvfp4" else "fp8"
    return None


def _compressed(data: Mapping[str, Any], ignored: tuple[str, ...], place: str) -> Quantisation:
    groups = data.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SizingError(f"{place}: config_groups is missing.")
    default: Scheme | None = None
    named: dict[str, Scheme] = {}
    for entry in groups.values():
        weights = entry.get("weights") if isinstance(entry, Mapping) else None
        if not isinstance(weights, Mapping):
            raise SizingError(f"{place}: config_groups: weights are missing.")
        scheme = _compressed_scheme(weights, str(data.get("format", "")), place)
        for target in entry.get("targets") or ("Linear",):
            if target in ("Linear", "FusedMoE"):
                default = scheme
            else:
                named[_bare(str(target))] = scheme
    kv = data.get("kv_cache_scheme")
    return Quantisation(
        "compressed-tensors",
        default or PLAIN,
        named=named,
        ignored=ignored,
        kv_cache="fp8" if isinstance(kv, Mapping) and kv.get("num_bits") == 8 else None,
    )


def _compressed_scheme(weights: Mapping[str, Any], style: str, place: str) -> Scheme:
    bits = weights.get("num_bits")
    kind = weights.get("type")
    strategy = weights.get("strategy")
    group = weights.get("group_size")
    if kind == "float" and bits == 8:
        block = weights.get("block_structure")
        if strategy == "block" and isinstance(block, list):
            return Scheme("fp8", 8, block=(int(block[0]), int(block[1])))
        return Scheme("fp8", 8, per_row=strategy == "channel")
    if kind == "float" and bits == 4:
        return Scheme("mxfp4", 4, 32) if group == 32 else Scheme("nvfp4", 4, int(group or 16))
    if kind == "int" and bits in (2, 3, 4, 8):
        if bits == 8 and not style.startswith("pack"):
            return Scheme("int8", 8)
        return Scheme(
            "int", int(bits), int(group) if group else None, zeros=weights.get("symmetric") is False
        )
    raise SizingError(f"{place}: weights of {bits} bits {kind!r} ({strategy}) are not known.")
