"""Last step of a start, as root: what vLLM said of its memory, against what was planned, and
where the seconds of the start went.

Reads the start's own lines in the journal, writes FLEET_STATE/actual.json and a file of metrics
for the node exporter, and says in the journal where plan and fact differ by more than 5 %. The
plan is /etc/vllm/<instance>.plan.json, where there is one. Its failure fails no start.

Environment: FLEET_INSTANCE, FLEET_MODEL, FLEET_STATE, INVOCATION_ID.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

ETC = "/etc/vllm"
METRICS = "/var/lib/vllm/metrics"
JOURNAL_LINES = 20000
JOURNAL_SECONDS = 20
TOLERANCE = 0.05
BLOCK_SIZE = 16  # of the V0 engine, which prints blocks

GIB = r"(-?[\d.]+)\s*Gi?B\b"  # V0 prints GiB as GB
# Per card. Workers print one line each: of weights the largest counts, of KV cache the least.
WEIGHTS = re.compile(
    r"(?:Model loading took|Loading (?:model )?weights took|model weights takes?)\s+" + GIB, re.I
)
KV_MEMORY = re.compile(
    r"(?:Available KV cache memory:|memory reserved for KV[ _]cache is)\s+" + GIB, re.I
)
KV_TOKENS = re.compile(r"KV cache size:\s*(\d[\d,]*)\s*tokens", re.I)
KV_BLOCKS = re.compile(r"#\s*(?:GPU|cuda|rocm) blocks:\s*(\d[\d,]*)")
IN_BLOCKS = re.compile(r"block_size[=:]\s*(\d+)")
CONCURRENCY = re.compile(
    r"maximum concurrency for\s+(\d[\d,]*)\s+tokens per request:\s*~?([\d.]+)x", re.I
)
ACTIVATION = re.compile(r"activation peak memory takes\s+" + GIB, re.I)
NON_TORCH = re.compile(r"non_torch_memory takes\s+" + GIB, re.I)
GRAPHS = re.compile(r"Graph capturing finished in .*?took\s+" + GIB, re.I)
VERSION = re.compile(r"vLLM (?:API server )?version (\d+\.\d+\.\d+\S*)")
FREE = re.compile(r"Free memory on device(?: \S+)? \(([\d.]+)/([\d.]+) GiB\)")

# Seconds of a start by part. Ranks load side by side, so the slowest counts; the model and an
# encoder are compiled one after the other, and print a line each.
SECONDS = (
    ("weights", re.compile(r"Model loading took .*? and ([\d.]+) seconds", re.I)),
    ("weights", re.compile(r"Loading (?:model )?weights took ([\d.]+) seconds", re.I)),
    ("compile", re.compile(r"\(compilation: ([\d.]+) s", re.I)),
    ("compile", re.compile(r"torch\.compile (?:took|takes) ([\d.]+) s in total", re.I)),
    ("graphs", re.compile(r"Graph capturing finished in ([\d.]+) secs", re.I)),
)

# Name in a plan and in the metrics, its words, its unit
FIGURES: Tuple[Tuple[str, str, str], ...] = (
    ("weights_gib", "weights", "GiB"),
    ("kv_cache_gib", "KV cache", "GiB"),
    ("kv_cache_tokens", "KV cache", "tokens"),
    ("max_concurrency", "requests of full length at once", ""),
)


def parse(lines: Iterable[str]) -> Dict[str, Any]:
    """What a start printed, by figure; what it did not print is missing.

    Reads the lines of V0 (blocks, the sentence about profiling), of V1, and the form of 2026
    with size and concurrency in one line; ranks and their prefixes do not matter.
    """
    found: Dict[str, Any] = {}
    block_size = BLOCK_SIZE
    for line in lines:
        for name, pattern, choose in (
            ("weights_gib", WEIGHTS, max),
            ("kv_cache_gib", KV_MEMORY, min),
            ("activation_gib", ACTIVATION, max),
            ("non_torch_gib", NON_TORCH, max),
            ("cuda_graphs_gib", GRAPHS, max),
        ):
            if match := pattern.search(line):
                value = _number(match[1])
                if value is not None:
                    found[name] = choose(found.get(name, value), value)
        if match := IN_BLOCKS.search(line):
            block_size = int(match[1])
        if match := KV_TOKENS.search(line):
            tokens = _whole(match[1])
            found["kv_cache_tokens"] = min(found.get("kv_cache_tokens", tokens), tokens)
        elif match := KV_BLOCKS.search(line):
            tokens = _whole(match[1]) * block_size
            found["kv_cache_tokens"] = min(found.get("kv_cache_tokens", tokens), tokens)
        if match := CONCURRENCY.search(line):
            value = _number(match[2])
            if value is not None:
                found["max_concurrency"] = min(found.get("max_concurrency", value), value)
                found["max_model_len"] = _whole(match[1])
        if match := VERSION.search(line):
            found.setdefault("vllm_version", match[1])
        if match := FREE.search(line):
            found["free_gib"], found["total_gib"] = float(match[1]), float(match[2])
    return found


def durations(lines: Iterable[str]) -> Dict[str, float]:
    """Seconds of a start by part, as vLLM printed them; what it did not print is missing."""
    found: Dict[str, float] = {}
    for line in lines:
        for part, pattern in SECONDS:
            if match := pattern.search(line):
                value = _number(match[1])
                if value is not None:
                    found[part] = max(found.get(part, value), value)
                break
    return found


def compare(planned: Mapping[str, Any], actual: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Figures that differ by more than 5 %, each with its likely cause."""
    found = []
    for name, _, _ in FIGURES:
        want, got = planned.get(name), actual.get(name)
        if not isinstance(want, (int, float)) or not isinstance(got, (int, float)) or want <= 0:
            continue
        share = got / want - 1
        if abs(share) > TOLERANCE:
            found.append(
                {
                    "what": name,
                    "planned": want,
                    "actual": got,
                    "percent": round(100 * share, 1),
                    "cause": _cause(name, share, planned, actual),
                }
            )
    return found


def _cause(name: str, share: float, planned: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Why one figure differs, as far as the others tell."""
    weights = _share("weights_gib", planned, actual)
    memory = _share("kv_cache_gib", planned, actual)
    if name == "weights_gib":
        if share > 0.6:
            return (
                "the weights were loaded in a wider type than planned: see `quantization` and "
                "`dtype` in vllm_args and the config.json beside group_vars"
            )
        if share > 0:
            return (
                "more was loaded than config.json tells: layers left unquantised, a vision tower "
                "or draft layers; is the config.json beside group_vars of this revision?"
            )
        return (
            "less was loaded than planned: other tensor or pipeline parallelism, weights of "
            "another revision, or a tower left out (`limit-mm-per-prompt`)"
        )
    if name == "kv_cache_gib":
        if weights is not None and abs(weights) > TOLERANCE:
            return "it is what the weights leave: see their difference"
        if share < 0:
            return (
                "less of the card was free than planned (another process at the start), or "
                "activations take more: see `max-num-batched-tokens` and the kernels in use"
            )
        return "activations and CUDA graphs take less than the plan keeps free for them"
    if name == "kv_cache_tokens":
        if memory is not None and abs(memory) > TOLERANCE:
            return "it follows from the memory of the KV cache: see its difference"
        return (
            "a token takes other room than planned: `kv-cache-dtype`, replicated heads, or a "
            "hybrid model, for which vLLM prints a figure derived from the concurrency"
        )
    lengths = planned.get("max_model_len"), actual.get("max_model_len")
    if None not in lengths and lengths[0] != lengths[1]:
        return "vLLM counts requests of %s tokens, the plan of %s" % (lengths[1], lengths[0])
    tokens = _share("kv_cache_tokens", planned, actual)
    if tokens is not None and abs(tokens) > TOLERANCE:
        return "it follows from the tokens of the KV cache: see their difference"
    return "requests take other room than planned: windows or states are counted otherwise"


def _share(name: str, planned: Mapping[str, Any], actual: Mapping[str, Any]) -> Optional[float]:
    want, got = planned.get(name), actual.get(name)
    if not isinstance(want, (int, float)) or not isinstance(got, (int, float)) or want <= 0:
        return None
    return got / want - 1


def sentence(actual: Mapping[str, Any]) -> str:
    """The figures of a start in one line; "" where it printed none."""
    parts = []
    if "weights_gib" in actual:
        parts.append("weights %.2f GiB" % actual["weights_gib"])
    if "kv_cache_gib" in actual or "kv_cache_tokens" in actual:
        text = "KV cache"
        if "kv_cache_gib" in actual:
            text += " %.2f GiB" % actual["kv_cache_gib"]
        if "kv_cache_tokens" in actual:
            text += " for {:,} tokens".format(actual["kv_cache_tokens"])
        parts.append(text)
    if "max_concurrency" in actual:
        parts.append(
            "{:.2f} requests of {:,} tokens at once".format(
                actual["max_concurrency"], actual["max_model_len"]
            )
        )
    return ", ".join(parts)


def warning(difference: Mapping[str, Any]) -> str:
    """One difference in words."""
    _, words, unit = next(figure for figure in FIGURES if figure[0] == difference["what"])
    unit = " " + unit if unit else ""
    return "{}: {:,.6g}{} planned, {:,.6g}{} found ({:+.1f} %): {}".format(
        words,
        difference["planned"],
        unit,
        difference["actual"],
        unit,
        difference["percent"],
        difference["cause"],
    )


def metrics(
    name: str,
    model: str,
    planned: Mapping[str, Any],
    actual: Mapping[str, Any],
    differences: List[Dict[str, Any]],
) -> str:
    """Text for the node exporter's textfile collector."""
    labels = 'vllm_instance="%s",pool="%s"' % (_escaped(name), _escaped(model))
    series = (
        ("weights_gib", "weights_bytes", "Weights on each card, in bytes.", 2**30),
        ("kv_cache_gib", "kv_cache_bytes", "KV cache on each card, in bytes.", 2**30),
        ("kv_cache_tokens", "kv_cache_tokens", "Tokens that the KV cache holds.", 1),
        ("max_concurrency", "max_concurrency", "Requests of full length held at once.", 1),
    )
    lines = []
    for key, suffix, text, factor in series:
        values = [
            (source, figures[key])
            for source, figures in (("plan", planned), ("actual", actual))
            if isinstance(figures.get(key), (int, float))
        ]
        if not values:
            continue
        metric = "vllm_fleet_plan_" + suffix
        lines += ["# HELP %s %s" % (metric, text), "# TYPE %s gauge" % metric]
        for source, value in values:
            lines.append('%s{%s,source="%s"} %.10g' % (metric, labels, source, value * factor))
    metric = "vllm_fleet_plan_differences"
    lines += [
        "# HELP %s Figures of the last start that differ from the plan by over 5 %%." % metric,
        "# TYPE %s gauge" % metric,
        "%s{%s} %d" % (metric, labels, len(differences)),
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def journal(invocation: str) -> List[str]:
    """What this start logged. Raises OSError or subprocess.SubprocessError."""
    match = "_SYSTEMD_INVOCATION_ID=" + invocation
    done = subprocess.run(
        ["journalctl", match, "-o", "cat", "--no-pager", "-n", str(JOURNAL_LINES)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=JOURNAL_SECONDS,
        check=False,
    )
    return done.stdout.decode(errors="replace").splitlines()


def write(path: str, text: str, mode: int) -> None:
    """Put a file in place at once; never through a link that another user may have put there."""
    temporary = "%s.%d" % (path, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    os.rename(temporary, path)


def read_plan(path: str) -> Dict[str, Any]:
    """The planned figures; empty where nothing was planned."""
    try:
        with open(path, encoding="utf-8") as file:
            plan = json.load(file)
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _number(text: str) -> Optional[float]:
    try:
        return float(text.rstrip("."))
    except ValueError:
        return None


def _whole(text: str) -> int:
    return int(text.replace(",", "") or 0)


def main(env: Mapping[str, str]) -> int:
    """Read, compare, write, say; the exit code."""
    name, invocation = env["FLEET_INSTANCE"], env.get("INVOCATION_ID", "")
    try:
        lines = journal(invocation) if invocation else []
        actual = parse(lines)
        planned = read_plan("%s/%s.plan.json" % (ETC, name))
        differences = compare(planned, actual)
        report = {
            "instance": name,
            "invocation": invocation,
            "at": int(time.time()),
            "actual": actual,
            "seconds": durations(lines),
            "planned": {k: v for k, v in planned.items() if isinstance(v, (int, float))},
            "differences": differences,
        }
        text = json.dumps(report, indent=1) + "\n"
        write(os.path.join(env["FLEET_STATE"], "actual.json"), text, 0o644)
        os.makedirs(METRICS, exist_ok=True)
        exported = metrics(name, env.get("FLEET_MODEL", ""), planned, actual, differences)
        write("%s/vllm_fleet_plan_%s.prom" % (METRICS, name), exported, 0o644)
    except (OSError, subprocess.SubprocessError) as error:
        print("bootlog: %s: memory not recorded: %s" % (name, error), file=sys.stderr, flush=True)
        return 1
    print("bootlog: %s: %s" % (name, sentence(actual) or "vLLM said nothing of its memory"))
    for one in differences:
        print("bootlog: %s: WARNING: %s" % (name, warning(one)))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
