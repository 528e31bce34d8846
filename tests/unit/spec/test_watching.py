"""Settings of receivers and of the probe: refused by file, line and key."""

from __future__ import annotations

from tests.unit.spec.conftest import Project


def test_receivers_that_cannot_work_are_refused_where_they_stand(project: Project) -> None:
    project.write("secrets/hook", "https://hook.example.org\n")
    project.good(
        then="""\
monitoring:
  alerting:
    receivers:
      good: {kind: webhook, url_file: secrets/hook}
      ding: {kind: dingtalk}
      ops: {kind: mail, to: [ops@example.org]}
      gone: {kind: feishu, url_file: secrets/none}
"""
    )
    said = project.complaints()
    assert any(":15:" in s and "receivers.ding" in s and "needs `url_file`" in s for s in said)
    assert any(":16:" in s and "needs `monitoring.alerting.mail`" in s for s in said)
    assert any('"secrets/none" does not exist' in s for s in said)
    assert len(said) == 3
    project.good(then="monitoring: {alerting: {receivers: {odd: {kind: pigeon}}}}\n")
    assert "receivers.odd.kind" in project.complaints()[0]


def test_an_address_in_the_place_of_a_files_name_is_refused(project: Project) -> None:
    project.good(
        then="monitoring: {alerting: {receivers: {w: "
        "{kind: wecom, url_file: 'https://qyapi.example.org/send?key=1'}}}}\n"
    )
    assert len(project.complaints()) == 1


def test_times_of_the_probe_follow_each_other(project: Project) -> None:
    project.good(then="probe: {deadline_seconds: 30}\n")
    assert any(
        "wedged_seconds (20) must not be below deadline_seconds (30)" in s
        for s in project.complaints()
    )
    project.good(then="probe: {deadline_seconds: 30, wedged_seconds: 40}\n")
    assert project.complaints() == []


def test_targets_are_bounds_of_the_histogram(project: Project) -> None:
    project.good(then="monitoring: {objectives: {first_token_seconds: 3}}\n")
    assert "must be one of 0.1, 0.25" in project.complaints()[0]
    project.good(then="monitoring: {objectives: {first_token_seconds: 5}}\n")
    assert project.complaints() == []


def test_a_port_of_two_is_refused(project: Project) -> None:
    project.write("secrets/hook", "https://hook.example.org\n")
    project.good(
        then="monitoring: {listen: 9093, alerting: {receivers: "
        "{h: {kind: webhook, url_file: secrets/hook}}}}\n"
    )
    assert len(project.complaints()) == 1
    assert "9093" in project.complaints()[0]
