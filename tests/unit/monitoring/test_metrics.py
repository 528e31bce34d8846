"""Names of metrics: one source for all versions, and expressions for two versions at once."""

from __future__ import annotations

import pytest

from vllm_fleet import engine_data, metrics

NEW = {"vllm:kv_cache_usage_perc", "vllm:inter_token_latency_seconds_bucket", "vllm:late_total"}
OLD = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds_bucket"}
TWO = {"2.0.0": NEW, "1.0.0": OLD}


def test_every_supported_version_is_known() -> None:
    assert metrics.versions() == engine_data.versions()
    assert metrics.versions()[0] == "0.18.0"
    assert metrics.versions()[-1] == "0.33.0"


@pytest.mark.parametrize("version", metrics.versions())
def test_histograms_are_known_by_the_names_of_their_samples(version: str) -> None:
    names = metrics.series(version)
    assert "vllm:time_to_first_token_seconds_bucket" in names
    assert "vllm:time_to_first_token_seconds" not in names
    assert "vllm:num_preemptions_total" in names
    assert "vllm:num_preemptions" not in names  # a counter's sample has another name
    assert "vllm:gpu_cache_usage_perc" not in names


def test_an_unknown_version_has_the_names_of_the_nearest_older_one() -> None:
    assert metrics.series("0.32.7") == metrics.series("0.32.0")


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (
            "max(vllm:kv_cache_usage_perc) > 0.9",
            'max({__name__=~"vllm:gpu_cache_usage_perc|vllm:kv_cache_usage_perc"}) > 0.9',
        ),
        (
            'rate(vllm:inter_token_latency_seconds_bucket{pool="a"}[5m])',
            'rate({__name__=~"vllm:inter_token_latency_seconds_bucket|'
            'vllm:time_per_output_token_seconds_bucket",pool="a"}[5m])',
        ),
        ("rate(vllm:late_total[5m])", "rate(vllm:late_total[5m])"),
        ("up == 0", "up == 0"),
    ],
)
def test_two_versions_are_asked_at_once(expr: str, expected: str) -> None:
    assert metrics.adapted(expr, ("1.0.0", "2.0.0"), TWO) == expected


def test_one_version_is_asked_by_its_own_name() -> None:
    expr = 'vllm:kv_cache_usage_perc{host="a"} + up'
    assert metrics.adapted(expr, ("1.0.0",), TWO) == 'vllm:gpu_cache_usage_perc{host="a"} + up'
    assert metrics.adapted(expr, ("2.0.0",), TWO) == expr


def test_what_no_deployed_version_exports_is_not_asked() -> None:
    assert metrics.adapted("vllm:late_total", ("1.0.0",), TWO) is None
    assert metrics.adapted("vllm:nothing_total", ("1.0.0", "2.0.0"), TWO) is None
    assert metrics.adapted("vllm:admission_rejections_total", ("0.31.0",)) is None
    assert metrics.adapted("vllm:admission_rejections_total", ("0.31.0", "0.32.0")) is not None
