"""Predicted against printed: what vLLM logged for given models and cards, and what we say.

    python benchmarks/sizing.py [CASES.json] [--configs DIR]

CASES (or SIZING_CASES) is the repository's own file by default; a file of the same keys, or of
the short ones (gmu, w_gib, ...), is taken too. ``complete`` cases give all inputs: weights
within 1 %, KV tokens or concurrency within 2 %. ``diagnostic`` ones are models cut to a few
layers to tell terms apart, and runs that the formula was mended with (their note says what); they
are shown, not judged. For the others the printed KV memory is an input, and what was not stated is
named. Peers run where SIZING_PEERS_PYTHON is a Python with llm-d-planner and vllm-wizard (see
sizing_peers.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from vllm_fleet.sizing import Sizing, SizingError, find_gpu, size  # noqa: E402
from vllm_fleet.sizing.models import build  # noqa: E402
from vllm_fleet.sizing.quant import quantisation  # noqa: E402
from vllm_fleet.sizing.weights import Card, Parallel, rank_weights, shard  # noqa: E402

WEIGHTS_BOUND, KV_BOUND = 0.01, 0.02
SHORT = {
    "gmu": "gpu_memory_utilization",
    "max_len": "max_model_len",
    "mnbt": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "block_size": "block_size",
    "eager": "enforce_eager",
    "mtp": "speculative_tokens",
}
PRINTED = {
    "w_gib": "weights_gib",
    "act_gib": "activation_gib",
    "nontorch_gib": "non_torch_gib",
    "kv_gib": "kv_cache_gib",
    "tokens": "kv_cache_tokens",
    "conc": "max_concurrency",
    "max_concurrency": "max_concurrency",
    "bpt": "kv_bytes_per_token",
    "at": "at",
}


@dataclass
class Row:
    """One case's outcome. Errors are shares of the printed figure."""

    case: dict[str, Any]
    found: Sizing | None = None
    errors: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: str = ""
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)


def normal(case: dict[str, Any]) -> dict[str, Any]:
    """A case of the short keys in the keys of our own file."""
    if "printed" in case:
        return case
    given = {SHORT[k]: case[k] for k in SHORT if case.get(k) is not None}
    if case.get("kv_dtype"):
        kv = str(case["kv_dtype"])
        given["kv_cache_dtype"] = {"bf16": "auto", "fp8_e4m3": "fp8"}.get(kv, kv)
    if case.get("quantization"):
        given["quantization"] = case["quantization"]
    elif "runtime fp8" in str(case.get("model", "")):
        given["quantization"] = "fp8"
    return {
        "id": case["id"],
        "model": case.get("model", ""),
        "config": case.get("config"),
        "card": str(case.get("gpu", "")).split("(")[0].strip(),
        "card_gib": case.get("gpu_gib"),
        "vllm": case.get("vllm"),
        "tp": case.get("tp", 1),
        "pp": case.get("pp", 1),
        "given": given,
        "printed": {PRINTED[k]: case[k] for k in PRINTED if case.get(k) is not None},
        "complete": bool(case.get("complete")),
        "source": case.get("source", ""),
        "note": case.get("note", ""),
        "dp": case.get("dp", 1),
    }


def read_config(name: str, places: list[Path]) -> dict[str, Any]:
    """A config of a case from the first place that has it."""
    for place in places:
        for file in (place / name, place / f"{name}.json"):
            if file.is_file():
                data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return data
    raise SizingError(f"config {name} is in none of {', '.join(map(str, places))}")


def predict(case: dict[str, Any], config: dict[str, Any], **changes: Any) -> Sizing:
    """Our figures for a case; where inputs are incomplete, from the printed KV memory."""
    given = {**case["given"], **changes}
    printed = case["printed"]
    try:
        gpu = find_gpu(case["card"] or "H100")
    except SizingError:
        gpu = find_gpu("H200" if "H200" in case["card"] else "H100")
    pinned = None if case["complete"] else printed.get("kv_cache_gib")
    if "max_model_len" not in given and "at" in printed:
        given["max_model_len"] = printed["at"]
    return size(
        config,
        gpu=gpu,
        gpu_memory_gib=case.get("card_gib") or gpu.gib,
        tp=case["tp"],
        pp=case.get("pp", 1),
        dp=case.get("dp", 1),
        vllm_version=case.get("vllm") or "0.19.0",
        kv_cache_memory_gib=pinned,
        **given,
    )


def judge(case: dict[str, Any], places: list[Path]) -> Row:
    """Sizes one case and compares."""
    row = Row(case)
    given, printed = case["given"], case["printed"]
    for name in ("gpu_memory_utilization", "max_model_len", "kv_cache_dtype"):
        if name not in given and not (name == "max_model_len" and "at" in printed):
            row.missing.append(name)
    if not case.get("vllm"):
        row.missing.append("vllm version")
    if not case["config"]:
        row.missing.append("config.json")
        kv, per = printed.get("kv_cache_gib"), printed.get("kv_bytes_per_token")
        if kv and per and printed.get("kv_cache_tokens"):
            row.errors["tokens from printed bytes"] = (
                kv * 2**30 / per / printed["kv_cache_tokens"] - 1
            )
        return row
    try:
        config = read_config(case["config"], places)
        found = predict(case, config)
    except SizingError as error:
        row.refused = str(error)
        return row
    row.found = found
    rank = found.ranks[0]
    ours = {
        "weights_gib": found.weights_gib,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "kv_cache_tokens": found.kv_cache_tokens,
        "max_concurrency": found.max_concurrency,
        "kv_cache_gib": found.kv_cache_gib,
        # Logs of pipeline runs show the first rank.
        "activation_gib": rank.activation_gib,
        "non_torch_gib": rank.non_torch_gib,
        "cuda_graphs_gib": rank.graphs_gib,
    }
    for name, value in ours.items():
        if printed.get(name):
            row.errors[name] = value / printed[name] - 1
    if not case["complete"]:
        row.errors.pop("kv_cache_gib", None)
        if "kv_cache_gib" not in printed:
            row.missing.append("KV memory")
        row.notes += alternatives(case, config, row)
    return row


def alternatives(case: dict[str, Any], config: dict[str, Any], row: Row) -> list[str]:
    """Which value of an input that was not stated gives the printed figures."""
    worst = max(
        (abs(row.errors.get(k, 0)) for k in ("kv_cache_tokens", "max_concurrency")), default=0
    )
    if worst <= KV_BOUND or "kv_cache_tokens" not in case["printed"]:
        return []
    trials: list[tuple[str, dict[str, Any]]] = [("prefix caching on", {"prefix_caching": True})]
    if "kv_cache_dtype" not in case["given"]:
        trials.append(("an FP8 KV cache", {"kv_cache_dtype": "fp8"}))
        for tokens in (2048, 4096):
            trials.append(
                (
                    f"an FP8 KV cache and {tokens} batched tokens",
                    {
                        "kv_cache_dtype": "fp8",
                        "max_num_batched_tokens": tokens,
                        "max_num_seqs": 256,
                    },
                )
            )
    for text, change in trials:
        try:
            found = predict(case, config, **change)
        except SizingError:
            continue
        off = [
            abs(getattr(found, name) / case["printed"][name] - 1)
            for name in ("kv_cache_tokens", "max_concurrency")
            if case["printed"].get(name)
        ]
        if max(off) <= KV_BOUND:
            return [f"within {max(off):.1%} with {text}, which was not stated"]
    return []


def gpustack(case: dict[str, Any], config: dict[str, Any]) -> dict[str, float]:
    """GPUStack's rule for vLLM: VRAM = weights x 1.2 + 2 GiB over the cards; the rest is KV."""
    cards = case["tp"] * case.get("pp", 1)
    disk = (
        sum(
            w.total
            for w in rank_weights(
                build(config),
                Parallel(),
                quantisation(config, case["given"].get("quantization")),
                dtype="bfloat16",
                card=Card(),
            )
        )
        / 2**30
    )
    claim = (disk * 1.2 + 2) / cards
    utilization = case["given"].get("gpu_memory_utilization", 0.9)
    kv = (case.get("card_gib") or 80) * utilization - claim
    return {"weights_gib": claim, "kv_cache_gib": kv}


def peer_inputs(row: Row, config: dict[str, Any]) -> dict[str, Any]:
    """What other planners are given: more than they would find by themselves."""
    case = row.case
    model = build(config)
    quant = quantisation(config, case["given"].get("quantization"))
    params: dict[str, int] = {}
    weights = [w for layer in model.layers for w in layer.weights]
    weights += [model.embedding, *((model.head,) if model.head else ()), *model.others]
    for weight in weights:
        out, inner, count = shard(weight, Parallel())
        kind = quant.scheme(weight.name, weight.role).kind
        dtype = {"none": "BF16", "fp8": "F8_E4M3"}.get(kind, "U8")
        params[dtype] = params.get(dtype, 0) + int(out * inner * count)
    text = config.get("text_config") or config
    return {
        "id": case["id"],
        "config": {**config, **text},
        "params": params,
        "tp": case["tp"],
        "pp": case.get("pp", 1),
        "gib": case.get("card_gib") or 80,
        "gmu": case["given"].get("gpu_memory_utilization", 0.9),
        "length": case["given"].get("max_model_len", 8192),
        "quant": quant.method,
        "kv_fp8": "fp8" in str(case["given"].get("kv_cache_dtype", "")),
    }


def ask_peers(rows: list[Row], places: list[Path]) -> str:
    """Fills in the peers' figures; returns why they are missing, or ""."""
    python = os.environ.get("SIZING_PEERS_PYTHON")
    inputs = []
    for row in rows:
        if row.found is None or not row.case["complete"] or row.case.get("diagnostic"):
            continue
        config = read_config(row.case["config"], places)
        row.peers["gpustack"] = gpustack(row.case, config)
        inputs.append(peer_inputs(row, config))
    if not python:
        return "SIZING_PEERS_PYTHON is not set: llm-d-planner and vllm-wizard were not run"
    done = subprocess.run(
        [python, str(HERE / "sizing_peers.py")],
        input=json.dumps(inputs),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return f"peers failed: {done.stderr.strip().splitlines()[-1:]}"
    answers = json.loads(done.stdout)
    for row in rows:
        row.peers.update(answers.get(row.case["id"], {}))
    return ""


def passes(row: Row) -> bool:
    """Whether a complete case is within the bounds."""
    if row.found is None:
        return False
    errors = row.errors
    kv = [
        abs(errors[k])
        for k in ("kv_cache_tokens", "max_concurrency", "kv_cache_gib")
        if k in errors
    ]
    return abs(errors.get("weights_gib", 0)) <= WEIGHTS_BOUND and all(e <= KV_BOUND for e in kv)


def cell(row: Row, name: str, form: str = ".2f") -> str:
    """Ours against the printed figure and the error."""
    printed = row.case["printed"].get(name)
    if row.found is None or printed is None or name not in row.errors:
        return "-"
    ours = printed * (1 + row.errors[name])
    return f"{ours:{form}} / {printed:{form}} {row.errors[name]:+.2%}"


def report(rows: list[Row]) -> None:
    """The tables."""
    print(f"{'case':31} {'weights GiB':25} {'KV GiB':26} {'KV tokens':33} concurrency")
    for row in rows:
        mark = "" if row.case["complete"] else " *"
        mark = " d" if row.case.get("diagnostic") else mark
        print(
            f"{row.case['id'][:29] + mark:31} {cell(row, 'weights_gib'):25} "
            f"{cell(row, 'kv_cache_gib'):26} {cell(row, 'kv_cache_tokens', ',.0f'):33} "
            f"{cell(row, 'max_concurrency')}"
        )
        if row.found is not None and row.case["complete"] and "kv_cache_tokens" in row.errors:
            span = row.found.spread["kv_cache_tokens"]
            if span.high - span.low > 0.04 * max(row.found.kv_cache_tokens, 1):
                print(f"{'':31} spread of ours: {span.low:,.0f} to {span.high:,.0f} tokens")
        if row.refused:
            print(f"{'':31} refused: {row.refused}")
        if row.case.get("diagnostic") and row.case.get("note"):
            print(f"{'':31} {row.case['note']}")
        if not row.case["complete"]:
            extra = [f"not stated: {', '.join(row.missing)}"] if row.missing else []
            if "kv_bytes_per_token" in row.errors:
                extra.append(f"bytes a token {row.errors['kv_bytes_per_token']:+.2%}")
            if "tokens from printed bytes" in row.errors:
                extra.append(
                    f"printed figures agree within {row.errors['tokens from printed bytes']:+.2%}"
                )
            print(f"{'':31} {'; '.join(extra + row.notes)}")
    print("* inputs incomplete: tokens and concurrency are computed from the printed KV memory")
    print("d diagnostic: to tell terms apart, or seen before the formula was mended; not judged")
    print()
    print("other terms, ours / printed GiB")
    for row in rows:
        names = ("activation_gib", "non_torch_gib", "cuda_graphs_gib")
        shown = [f"{n.removesuffix('_gib')} {cell(row, n)}" for n in names if n in row.errors]
        if shown:
            print(f"  {row.case['id'][:29]:31} {'; '.join(shown)}")
    print()
    print("peers on complete cases, error of weights / of KV memory")
    peers = ("gpustack", "llm-d-planner", "vllm-wizard")
    print(f"  {'case':31} {'ours':20} " + " ".join(f"{p:20}" for p in peers))
    for row in rows:
        if not row.peers:
            continue
        cells = [pair(row.errors.get("weights_gib"), row.errors.get("kv_cache_gib"))]
        for name in peers:
            found = row.peers.get(name)
            if not found or "error" in found:
                cells.append(found["error"][:19] if found else "not run")
                continue
            cells.append(
                pair(
                    *(
                        found[k] / row.case["printed"][k] - 1
                        if row.case["printed"].get(k)
                        else None
                        for k in ("weights_gib", "kv_cache_gib")
                    )
                )
            )
        print(f"  {row.case['id'][:29]:31} " + " ".join(f"{c:20}" for c in cells))
    print()


def pair(weights: float | None, kv: float | None) -> str:
    """Two errors in one cell."""
    return " / ".join("-" if v is None else f"{v:+.1%}" for v in (weights, kv))


def summary(rows: list[Row], peers_missing: str) -> dict[str, Any]:
    """Figures and bounds, for the last line."""
    complete = [r for r in rows if r.case["complete"] and not r.case.get("diagnostic")]
    failed = [r.case["id"] for r in complete if not passes(r)]

    def errors(name: str, which: list[Row]) -> list[float]:
        return [abs(r.errors[name]) for r in which if name in r.errors]

    def figures(values: list[float]) -> dict[str, float]:
        if not values:
            return {}
        return {"n": len(values), "median": round(median(values), 5), "max": round(max(values), 5)}

    def peer(name: str, key: str) -> dict[str, float]:
        return figures(
            [
                abs(r.peers[name][key] / r.case["printed"][key] - 1)
                for r in complete
                if key in r.peers.get(name, {}) and r.case["printed"].get(key)
            ]
        )

    return {
        "cases": len(rows),
        "complete": len(complete),
        "within_bounds": len(complete) - len(failed),
        "failed": failed,
        "bounds": {"weights": WEIGHTS_BOUND, "kv": KV_BOUND},
        "weights_error": figures(errors("weights_gib", complete)),
        "kv_gib_error": figures(errors("kv_cache_gib", complete)),
        "kv_tokens_error": figures(errors("kv_cache_tokens", complete)),
        "concurrency_error": figures(errors("max_concurrency", complete)),
        "diagnostic": {
            r.case["id"]: {k: round(v, 4) for k, v in r.errors.items()}
            for r in rows
            if r.case.get("diagnostic")
        },
        "incomplete_tokens_error": figures(
            errors(
                "kv_cache_tokens",
                [r for r in rows if not r.case["complete"] and "kv_cache_gib" in r.case["printed"]],
            )
        ),
        "peers": {
            name: {
                "weights_error": peer(name, "weights_gib"),
                "kv_gib_error": peer(name, "kv_cache_gib"),
                "kv_tokens_error": peer(name, "kv_cache_tokens"),
            }
            for name in ("gpustack", "llm-d-planner", "vllm-wizard")
        },
        "peers_missing": peers_missing,
        "met": not failed,
    }


def main() -> int:
    """Runs the comparison; 1 where a complete case misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own = HERE / "data" / "sizing"
    parser.add_argument(
        "cases", nargs="?", default=os.environ.get("SIZING_CASES", str(own / "cases.json"))
    )
    parser.add_argument("--configs", default=os.environ.get("SIZING_CONFIGS"))
    options = parser.parse_args()
    file = Path(options.cases)
    places = [Path(options.configs)] if options.configs else []
    places += [
        file.parent / "configs",
        file.parent.parent / "configs",
        file.parent,
        own / "configs",
    ]
    rows = [judge(normal(c), places) for c in json.loads(file.read_text(encoding="utf-8"))]
    missing = ask_peers(rows, places)
    report(rows)
    if missing:
        print(missing)
    result = summary(rows, missing)
    print(json.dumps(result))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
