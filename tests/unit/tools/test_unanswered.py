"""What is asked of a Prometheus for a panel and for a rule."""

from __future__ import annotations

import pytest

from tools.unanswered import any_value, resolved, selectors


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ('up{job="node"} == 0', ['up{job="node"}']),
        (
            "sum by (host, instance) (rate(vllm:generation_tokens_total[2m])) == 0",
            ["vllm:generation_tokens_total"],
        ),
        (
            "node_infiniband_state_id < 4 and max_over_time(node_infiniband_state_id[1d]) == 4",
            ["node_infiniband_state_id"],
        ),
        (
            'rate({__name__=~"vllm:a|vllm:b",pool="x"}[5m]) > 1',
            ['{__name__=~"vllm:a|vllm:b",pool="x"}'],
        ),
        (
            'count by (pool) (count by (pool, vllm_version) (up{job="vllm"})) > 1',
            ['up{job="vllm"}'],
        ),
        (
            "increase(prometheus_rule_evaluation_failures_total[5m]) > 0",
            ["prometheus_rule_evaluation_failures_total"],
        ),
        (
            'vllm_fleet_instance_info{a="b"} unless vllm_fleet_instance_info offset 2m',
            ['vllm_fleet_instance_info{a="b"}', "vllm_fleet_instance_info"],
        ),
    ],
)
def test_the_series_of_an_expression(expr: str, found: list[str]) -> None:
    assert selectors(expr) == found


def test_a_state_that_nothing_is_in_is_asked_for_by_its_label() -> None:
    series = 'node_systemd_unit_state{name=~"vllm@.+",state="failed"}'
    assert any_value(series) == 'node_systemd_unit_state{name!="",state!=""}'
    assert any_value('up{job="gpu"}') == 'up{job="gpu"}'


def test_a_panel_is_asked_with_everything_chosen() -> None:
    expr = 'sum by (pool) (rate(x{pool=~"$pool",host=~"$host"}[$__rate_interval]))'
    assert resolved(expr) == 'sum by (pool) (rate(x{pool=~".*",host=~".*"}[1m]))'
