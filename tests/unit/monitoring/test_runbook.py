"""The runbook holds an entry for all that leads to it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from vllm_fleet import alerts, causes, runbook

PAGE = Path(__file__).parents[3] / "docs" / "runbook.md"


def test_page_is_made_from_the_code() -> None:
    """Else: python -m vllm_fleet.runbook > docs/runbook.md"""
    assert PAGE.read_text() == runbook.text()


def test_every_alert_leads_to_one_entry() -> None:
    headings = re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)
    assert len(headings) == len(set(headings))
    for rule in yaml.safe_load(alerts.rules())["groups"][0]["rules"]:
        page, anchor = rule["annotations"]["runbook_url"].split("#")
        assert page == "docs/runbook.md"
        assert anchor in headings
        assert rule["for"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info", "none")


def test_every_cause_has_its_entry() -> None:
    headings = set(re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE))
    assert {c.id for c in causes.load()} <= headings
