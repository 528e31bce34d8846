"""From a case to what an operator is told: findings by rank, and the checklist. Pure."""

from __future__ import annotations

from typing import Any

from vllm_fleet.alerts import RUNBOOK
from vllm_fleet.doctor import gateways, hosts, instances, plans, watching
from vllm_fleet.doctor.case import Case, Finding
from vllm_fleet.doctor.entries import AREAS, LEVELS, Area, order

MATTERS = ("critical", "warning")


def diagnose(case: Case) -> list[Finding]:
    """Every finding: the worst first, among alike causes before what follows from them.

    What is known of a host that was not reached comes last: it is named, and holds up nothing.
    """
    found = [
        finding
        for part in (hosts, plans, instances, gateways, watching)
        for finding in part.findings(case)
    ]
    places = order()
    declared = [spec.name for spec in case.fleet.hosts]

    def rank(finding: Finding) -> tuple[bool, int, int, int]:
        place = declared.index(finding.host) if finding.host in declared else len(declared)
        level = LEVELS.index(finding.severity)
        unreached = finding.host in case.failures and finding.id == "host-down"
        return unreached, level, places.get(finding.id, len(places)), place

    return sorted(_once(found), key=rank)


def _once(findings: list[Finding]) -> list[Finding]:
    """Each once: a port that is blocked is met by gateways, Prometheus and the host itself."""
    found: dict[object, Finding] = {}
    for one in findings:
        same = (one.id, one.host, one.remedy) if one.id == "port-blocked" else one
        found.setdefault(same, one)
    return list(found.values())


def report(case: Case, findings: list[Finding]) -> dict[str, Any]:
    """The JSON of ``fleet doctor --json``."""
    monitors = case.fleet.group("monitoring")
    # Where alerts link to, the same entries are.
    runbook = monitors[0].settings.monitoring.alerting.runbook if monitors else RUNBOOK
    return {
        "ok": not any(f.severity in MATTERS for f in findings),
        "findings": [
            {
                "id": f.id,
                "level": f.severity,
                "area": f.area,
                "host": f.host,
                "instance": f.instance or None,
                "cause": f.text,
                "evidence": f.evidence,
                "remedy": list(f.remedy),
                "note": f.note or f.entry.remedy,
                "runbook": f"{runbook}#{f.id}",
            }
            for f in findings
        ],
        "checklist": [checked(area, case, findings) for area in AREAS],
        "hosts": [
            {
                "name": spec.name,
                "reached": spec.name in case.states,
                "why": case.failures.get(spec.name) or case.silent.get(spec.name) or "",
            }
            for spec in case.fleet.hosts
            if spec.name in case.states or spec.name in case.failures
        ],
    }


def checked(area: Area, case: Case, findings: list[Finding]) -> dict[str, Any]:
    """One line of the checklist."""
    its = [f for f in findings if f.area == area and f.severity in MATTERS]
    return {"area": area, "what": AREAS[area], "ok": not its, "seen": seen(area, case)}


def seen(area: Area, case: Case) -> str:
    """What was looked at, in figures; "" where nothing is counted."""
    answers = [case.answer(spec.name) for spec, _ in case.looked_at]
    placed = sum(len(spec.instances) for spec, _ in case.looked_at)
    if area == "hosts":
        return f"{len(case.states)} of {len(case.states) + len(case.failures)}"
    if area == "instances":
        good = [
            one
            for answer in answers
            for one in (answer.get("instances") or {}).values()
            if one and (one.get("answer") or {}).get("ok")
        ]
        return f"{len(good)} of {placed} answered"
    if area == "gateway":
        asked = [a for answer in answers for a in _answers_of(answer)]
        return f"{sum(bool(a and a['ok']) for a in asked)} of {len(asked)} models answered"
    if area == "weights":
        stamps = [s for answer in answers for s in (answer.get("stamps") or {}).values() if s]
        how = "every byte read" if case.deep else "by size and time; --deep reads every byte"
        return f"{len(stamps)} looked at, {how}"
    if area == "monitoring":
        found = [answer["prometheus"] for answer in answers if answer.get("prometheus")]
        if not found:
            return "no host monitors"
        down = sum(len(one["down"]) for one in found)
        targets = sum(one["targets"] for one in found)
        return (
            f"{targets - down} of {targets} targets, {sum(len(o['alerts']) for o in found)} alerts"
        )
    if area == "keys":
        count = sum(len(case.inputs.gateway_keys(g)) for g in case.fleet.group("gateway"))
        return f"{count} key{'s' * (count != 1)}" if count else "the gateway asks for none"
    return ""


def _answers_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return list(((answer.get("gateway") or {}).get("answers") or {}).values())
