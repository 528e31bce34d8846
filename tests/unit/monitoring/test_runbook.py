"""The runbook holds an entry for all that leads to it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from vllm_fleet import alerts, causes, runbook
from vllm_fleet.doctor.entries import ENTRIES, SHARED, known
from vllm_fleet.doctor.hosts import VERDICTS

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


def test_every_finding_of_the_doctor_leads_to_one_entry() -> None:
    headings = re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)
    assert set(known()) == set(headings)
    # One name space: no finding of its own is called as an alert or a known failure is.
    others = {a.anchor for a in alerts.alerts()} | {c.id for c in causes.load()}
    assert not others & {entry.id for entry in ENTRIES}
    assert set(SHARED) <= others


def test_every_id_in_the_doctors_code_is_an_entry() -> None:
    """Findings are made by name: one that is misspelt would fail only where it is found."""
    for name in ("hosts", "plans", "instances", "gateways", "watching"):
        text = (Path(runbook.__file__).parent / "doctor" / f"{name}.py").read_text()
        found = re.findall(r'Finding\(\s*"([a-z0-9-]+)"', text)
        assert found, name
        assert set(found) <= set(known()), name
    assert set(VERDICTS.values()) <= set(known())
