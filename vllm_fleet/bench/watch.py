"""What the engine itself counts while a load runs: its /metrics, read every second."""

from __future__ import annotations

import threading
import time
import urllib.request
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

EVERY_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0

HISTOGRAMS = {
    "first_token": ("vllm:time_to_first_token_seconds",),
    "between_tokens": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",  # its name up to 0.10
    ),
    "whole": ("vllm:e2e_request_latency_seconds",),
}
TOKENS = {"in": "vllm:prompt_tokens_total", "out": "vllm:generation_tokens_total"}
PREEMPTIONS = "vllm:num_preemptions_total"
KV_USAGE, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
MEMORY = "process_resident_memory_bytes"


@dataclass(frozen=True)
class Sample:
    """All values of one reading, summed over labels."""

    at: float
    values: dict[str, float]

    def get(self, *names: str) -> float | None:
        """The value of the first of these names that there is."""
        return next((self.values[name] for name in names if name in self.values), None)


@dataclass(frozen=True)
class Seen:
    """What the engine counted between two readings."""

    means: dict[str, float]  # first_token, between_tokens, whole: seconds
    counts: dict[str, float]
    tokens_in: float
    tokens_out: float
    preemptions: float
    kv_usage: float | None  # the highest reading, 0 to 1
    waiting: float | None  # the highest reading
    memory: tuple[tuple[float, float], ...] = ()  # (time, bytes of the server's process)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["memory"]
        return found


def parse(text: str, at: float) -> Sample:
    """The samples of a page of metrics, without the buckets of histograms."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if not one.name.endswith(("_bucket", "_created")):
                values[one.name] = values.get(one.name, 0.0) + float(one.value)
    return Sample(at, values)


def between(samples: Sequence[Sample], began: float, ended: float) -> Seen | None:
    """What was counted from ``began`` to ``ended``; None where no reading stands around it.

    The readings just before and just after count: what the engine finished in between belongs to
    this window as long as nobody else asks it.
    """
    times = [one.at for one in samples]
    first, last = bisect_right(times, began) - 1, bisect_left(times, ended)
    if first < 0 or last >= len(samples):
        return None
    before, after = samples[first], samples[last]
    means, counts = {}, {}
    for what, names in HISTOGRAMS.items():
        total = _grown(before, after, [f"{name}_sum" for name in names])
        count = _grown(before, after, [f"{name}_count" for name in names])
        counts[what] = count
        if count:
            means[what] = total / count
    inside = samples[first : last + 1]
    return Seen(
        means=means,
        counts=counts,
        tokens_in=_grown(before, after, [TOKENS["in"]]),
        tokens_out=_grown(before, after, [TOKENS["out"]]),
        preemptions=_grown(before, after, [PREEMPTIONS]),
        kv_usage=_highest(inside, KV_USAGE),
        waiting=_highest(inside, WAITING),
        memory=tuple(
            (one.at - began, memory) for one in inside if (memory := one.get(MEMORY)) is not None
        ),
    )


def _grown(before: Sample, after: Sample, names: Sequence[str]) -> float:
    return (after.get(*names) or 0.0) - (before.get(*names) or 0.0)


def _highest(samples: Sequence[Sample], name: str) -> float | None:
    return max((v for one in samples if (v := one.get(name)) is not None), default=None)


class Watch:
    """Reads a page of metrics in a thread of its own while the block lasts."""

    def __init__(self, url: str, *, every: float = EVERY_SECONDS) -> None:
        self.url = url
        self.samples: list[Sample] = []
        self.lost = ""  # why the last reading failed; empty where it did not
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._read()

    @property
    def of_vllm(self) -> bool:
        """Whether what was read is an engine's page."""
        return bool(self.samples) and self.samples[-1].get(RUNNING) is not None

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self._read()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self.url, timeout=TIMEOUT_SECONDS) as answer:
                text = answer.read().decode(errors="replace")
            # When it was answered: all that is in it has happened by then.
            self.samples.append(parse(text, time.time()))
            self.lost = ""
        except OSError as error:
            self.lost = str(error)
        except ValueError:
            self.lost = "what it answers is no page of metrics"
