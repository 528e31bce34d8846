"""Predictions of other planners for the cases on stdin; run by sizing.py with their Python.

    python -m venv peers && peers/bin/pip install llm-d-planner vllm-wizard
    SIZING_PEERS_PYTHON=peers/bin/python python benchmarks/sizing.py

Parameter counts, which llm-d-planner reads from the hub, are given to it exactly.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


def planner(case: dict[str, Any]) -> dict[str, float]:
    """llm-d-planner: planner.capacity_planner."""
    from planner import capacity_planner as p  # type: ignore[import-not-found]

    def namespace(value: Any) -> Any:
        if isinstance(value, dict):
            return SimpleNamespace(**{k: namespace(v) for k, v in value.items()})
        return value

    config = namespace(case["config"])
    if hasattr(config, "quantization_config"):
        config.quantization_config = case["config"]["quantization_config"]
    p.model_params_by_dtype = lambda *_args, **_kwargs: case["params"]
    weights = p.per_gpu_model_memory_required("m", config, case["tp"], case["pp"])
    kv = p.allocatable_kv_cache_memory(
        "m",
        config,
        case["gib"],
        case["gmu"],
        case["tp"],
        case["pp"],
        max_model_len=case["length"],
    ) / (case["tp"] * case["pp"])
    blocks = p.total_kv_cache_blocks(
        "m", config, case["length"], case["gib"], case["gmu"], tp=case["tp"], pp=case["pp"]
    )
    return {
        "weights_gib": weights,
        "kv_cache_gib": kv,
        "kv_cache_tokens": blocks * 16 / (case["tp"] * case["pp"]),
    }


def wizard(case: dict[str, Any]) -> dict[str, float]:
    """vllm-wizard: its own parameter count, heads and overhead."""
    from vllm_wizard.models import metadata as m  # type: ignore[import-not-found]
    from vllm_wizard.planning import memory as w  # type: ignore[import-not-found]
    from vllm_wizard.schemas.inputs import (  # type: ignore[import-not-found]
        DType,
        KVCacheDType,
        Quantization,
    )

    found = m._parse_config(case["config"], "m")
    params = m.estimate_params_from_config(found)
    quant = (
        Quantization(case["quant"])
        if case["quant"] in ("awq", "gptq", "fp8")
        else (Quantization.NONE)
    )
    weights = w.compute_weights_memory(params / 1e9, DType.AUTO, quant)
    total = int(case["gib"] * case["tp"] * case["pp"] * 2**30)
    overhead = w.compute_overhead(total, case["tp"])
    free = total * case["gmu"] - weights - overhead
    kind = KVCacheDType("fp8") if case["kv_fp8"] else KVCacheDType.AUTO
    one = w.compute_kv_cache_memory(found, 1, 1, kind)
    cards = case["tp"] * case["pp"]
    return {
        "weights_gib": weights / 2**30 / cards,
        "kv_cache_gib": free / 2**30 / cards,
        "kv_cache_tokens": max(free, 0) / one,
    }


def main() -> None:
    """Reads cases, prints {id: {peer: figures or an error}}."""
    out: dict[str, dict[str, Any]] = {}
    for case in json.load(sys.stdin):
        out[case["id"]] = {}
        for name, peer in (("llm-d-planner", planner), ("vllm-wizard", wizard)):
            try:
                out[case["id"]][name] = peer(case)
            except Exception as error:
                # A peer that cannot answer a case is a result, not a failure of the run.
                out[case["id"]][name] = {"error": f"{type(error).__name__}: {error}"[:80]}
    json.dump(out, sys.stdout)


main()
