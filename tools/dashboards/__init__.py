"""Grafana's dashboards as code: what they show (boards), and how Grafana wants it (render).

`python -m tools.dashboards` writes vllm_fleet/data/dashboards/*.json anew. The builders of
grafana-foundation-sdk are needed for that alone: a deploy reads the JSON.
"""
