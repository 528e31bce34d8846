"""Versions rolled through three hosts under constant load: upgrade.py, rollback.py, deploy.py.

The engine is the stand-in; everything around it is real. The tests share one fleet and run in
the order in which they stand here.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.operators import changes
from tests.integration.rolling import (
    INSTANCES,
    MANY,
    RollingFleet,
    Watched,
    deployed,
    make,
    record_says,
    told,
    tried,
)
from tests.testbed.bed import Bed
from tests.testbed.standin_wheel import Behaviour

pytestmark = [pytest.mark.long, pytest.mark.faults, pytest.mark.timeout(900)]

LONG = {"max_tokens": 2000, "ignore_eos": True}  # at 200 tokens a second
OLD, NEW = dict.fromkeys(INSTANCES, "0.31.0"), dict.fromkeys(INSTANCES, "0.32.0")


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Three hosts that serve 0.31.0."""
    fleet = make(empty_bed, tmp_path_factory.mktemp("rolling"))
    with deployed(fleet, "0.31.0"):
        yield fleet


def kept_serving(watched: Watched) -> None:
    """Whether no request failed, and no pool of several lost more than one."""
    assert len(watched.load.answers) > 20
    assert not watched.load.bad, told(watched.load.bad)
    assert len(watched.seen) > 20
    assert watched.most_out(MANY) <= 1


# --- good ----------------------------------------------------------------------------------

# The canaries of both pools first, then the others, each as declared.
ORDER = ["roll-3/a", "roll-1/c", "roll-3/b", "roll-1/a", "roll-2/a"]
HOOK = """\
#!/bin/sh
echo "$FLEET_WAVE $FLEET_INSTANCES $FLEET_FROM $FLEET_TO $FLEET_RESULT" >>told
"""


def test_an_upgrade_that_is_killed_goes_on_and_loses_no_request(fleet: RollingFleet) -> None:
    hook = fleet.operator.root / "hook"
    hook.write_text(HOOK)
    hook.chmod(0o755)

    def hooks(values: dict[str, Any]) -> None:
        values["rollout"] |= {"before_wave": "./hook", "after_wave": "./hook"}

    # 1.3 times slower passes.
    fleet.wants("0.32.0", Behaviour(tokens_per_second=154), hooks)
    with fleet.watched() as watched:
        fleet.killed_when("upgrade.py", "roll-3", record_says("a", '"name": "starting"'))
        refused = fleet.run("upgrade.py")
        assert refused.returncode == 1
        (run,) = set(re.findall(r"run (\d{4}-\d{6}-\w{4}), since", refused.stdout))
        done = fleet.run("upgrade.py", "--data", f"unlock={run}")
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == NEW
    kept_serving(watched)
    assert fleet.answers_while_out(watched) == []
    assert {name for name in INSTANCES if watched.spells_out(name)} == {*INSTANCES}
    lines = fleet.audit(fleet.audit()[-1]["run"])
    assert [f"{line['host']}/{line['instance']}" for line in lines] == ORDER
    for line in lines:
        rest = line["seconds"] - sum(line["parts"].values())
        print(
            f"{line['host']}/{line['instance']}: {line['seconds']} s, {line['parts']}, "
            f"overhead {rest:.1f} s"
        )
        assert rest < 30  # 5 on a machine that has nothing else to do
    # The same lines on the host of each, marks for Prometheus, and the operator's own programs.
    for line in lines:
        host = fleet.bed.host(line["host"])
        its = map(json.loads, host.sh("cat /var/lib/vllm/_rollout/audit.log").stdout.splitlines())
        assert line | {"at": ""} in [one | {"at": ""} for one in its]  # each by its own clock
        mark = f"/var/lib/vllm/metrics/vllm_fleet_change_{line['instance']}.prom"
        text = host.sh(f"cat {mark}").stdout
        assert 'result="done"' in text
        assert f'to="{line["to"].split()[0]}"' in text
    mark = fleet.bed.host("roll-gw").sh("cat /var/lib/vllm/metrics/vllm_fleet_rollout.prom").stdout
    assert 'what="upgrade.py",result="done"' in mark
    told = (fleet.operator.root / "told").read_text().splitlines()
    assert [line.split()[1] for line in told[-10::2]] == ORDER
    assert [line.split()[-1] for line in told[-9::2]] == ["done"] * 5


def test_a_second_upgrade_does_nothing(fleet: RollingFleet) -> None:
    fleet.wants("0.32.0")
    before, began = fleet.audit(), time.monotonic()
    done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    print(f"second upgrade.py: {time.monotonic() - began:.1f} s")
    assert fleet.audit() == before
    for name, (success, error, _) in changes(done.stdout).items():
        assert (success, error) == ("-", "-"), name


def test_rollback_is_one_command_and_deploy_leaves_it_so(fleet: RollingFleet) -> None:
    with fleet.watched() as watched:
        done = fleet.run("rollback.py")
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == OLD
    kept_serving(watched)
    assert fleet.answers_while_out(watched) == []
    for line in fleet.audit(fleet.audit()[-1]["run"]):
        print(f"{line['host']}/{line['instance']}: {line['seconds']} s, {line['parts']}")
    done = fleet.run("deploy.py")
    assert done.returncode == 0, done.stdout
    assert "is refused" in done.stdout
    for name, (success, error, _) in changes(done.stdout).items():
        assert (success, error) == ("-", "-"), name
    assert fleet.releases() == OLD


# --- worse ---------------------------------------------------------------------------------

WORSE = {
    "does not start": (Behaviour(fault="no start"), "told not to start"),
    "answers 500": (Behaviour(fault="500"), "500"),
    "never ends": (Behaviour(fault="never ends"), "was not over|not ready|failed to start"),
    "3 times slower": (Behaviour(tokens_per_second=66), "tokens a second"),
    "half the KV": (Behaviour(kv_tokens=50_000, kv_gib=0.5), "KV cache"),
    "an option less": (Behaviour(removed=("--dtype",)), "unrecognized arguments: --dtype"),
    "crashes": (Behaviour(crash_seconds=2), "is not ready any more|ended and was started"),
}


@pytest.mark.parametrize("how", WORSE)
def test_a_worse_version_stops_at_the_canary_which_goes_back(fleet: RollingFleet, how: str) -> None:
    behaviour, cause = WORSE[how]
    version = f"0.31.{1 + [*WORSE].index(how)}"
    fleet.wants(version, behaviour)
    with fleet.watched() as watched:
        done = fleet.run("upgrade.py")
    assert done.returncode == 1, done.stdout
    assert re.search(cause, done.stdout), done.stdout
    assert fleet.releases() == OLD
    canary = INSTANCES[0]
    if how != "an option less":
        assert f"{canary}: the new version was refused, the last good one serves" in done.stdout
        assert fleet.record(canary)["refused"][-1]["release"].startswith(version)
    assert fleet.record(canary)["step"] is None
    bad = watched.load.bad
    if how == "crashes":
        # Those in flight at the canary when it died, and no others.
        by_id = {line["request_id"]: tried(line) for line in fleet.access_log(watched.began)}
        assert all(by_id.get(one.id, [""])[-1] == canary for one in bad), told(bad)
        assert len(bad) <= 8, told(bad)
    else:
        kept_serving(watched)


# --- cut off -------------------------------------------------------------------------------


def test_a_host_that_dies_in_mid_wave_stops_it_and_is_named(fleet: RollingFleet) -> None:
    fleet.wants("0.32.4", Behaviour(start_seconds=3))
    host = fleet.bed.host("roll-2")
    with fleet.watched() as watched:
        done = fleet.meanwhile(
            "upgrade.py", "roll-2", record_says("a", '"name": "starting"'), host.powercut
        )
        assert done.returncode == 1, done.stdout
        assert "roll-2: connection lost" in done.stdout
        assert "roll-2/a: serves neither" in done.stdout
        host.boot()
        host.wait()
        done = fleet.run("upgrade.py", *fleet.unlocking())
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == dict.fromkeys(INSTANCES, "0.32.4")
    kept_serving(watched)


def test_a_disk_that_is_full_while_staging_touches_nobody(fleet: RollingFleet) -> None:
    before = fleet.releases()
    fleet.wants("0.32.5")
    host, place = fleet.bed.host("roll-2"), "/opt/vllm/releases"
    # Room enough when it begins, and none any more once the release is half there.
    host.sh(
        f"cp -a {place} /root/kept && mount -t tmpfs -o mode=755,size=8g tmpfs {place} && "
        f"cp -a /root/kept/. {place}/"
    )
    full = f"mount -o remount,size=$(du -sm {place} | cut -f1)m {place}"
    try:
        with fleet.watched() as watched:
            done = fleet.meanwhile(
                "upgrade.py",
                "roll-2",
                f"ls -d {place}/.*.part >/dev/null 2>&1",
                lambda: host.sh(full),
            )
    finally:
        host.sh(f"umount -l {place}; rm -rf /root/kept")
    assert done.returncode == 1, done.stdout
    assert re.search(r"roll-2.*No space left on device", done.stdout), done.stdout
    assert fleet.releases() == before
    assert not any(watched.spells_out(name) for name in INSTANCES)
    kept_serving(watched)


def test_one_operator_at_a_time_and_a_gateway_that_reloads(fleet: RollingFleet) -> None:
    fleet.wants("0.32.3")
    gateway = fleet.bed.host("roll-gw")
    with fleet.watched() as watched:
        first = fleet.operator.start("upgrade.py", inventory="rolling")
        assert first.stdout
        said, second = "", None
        for text in first.stdout:
            said += text
            if re.search(r"wave 1 of \d+ \(canary\): ", text):
                second = fleet.run("upgrade.py")
            if re.search(r": starting$", text):
                gateway.sh("systemctl reload nginx")
        assert first.wait(60) == 0, said
    assert second is not None
    assert second.returncode == 1
    assert "this fleet is being changed by" in second.stdout
    assert fleet.releases() == dict.fromkeys(INSTANCES, "0.32.3")
    kept_serving(watched)
    assert fleet.answers_while_out(watched) == []


def test_a_host_is_rebooted_under_load(fleet: RollingFleet) -> None:
    host = fleet.bed.host("roll-2")
    boot = host.sh("cat /proc/sys/kernel/random/boot_id").stdout
    with fleet.watched() as watched:
        done = fleet.run("maintain.py", "--limit", "roll-2", "--data", "do=reboot")
    assert done.returncode == 0, done.stdout
    assert host.sh("cat /proc/sys/kernel/random/boot_id").stdout != boot
    kept_serving(watched)
    assert fleet.answers_while_out(watched) == []
    assert {name for name in INSTANCES if watched.spells_out(name)} == {"roll-2/a"}
    # One with the only instance of a pool is left alone.
    refused = fleet.run("maintain.py", "--limit", "roll-1", "--data", "do=hold")
    assert refused.returncode == 1
    assert "nobody else serves pool qwen3-tiny" in refused.stdout


def test_a_held_host_is_left_alone_until_it_is_returned(fleet: RollingFleet) -> None:
    only = ("--limit", "roll-2", "--data")
    with fleet.watched() as watched:
        done = fleet.run("maintain.py", *only, "do=hold", "--data", "why=card 3")
        assert done.returncode == 0, done.stdout
        unit = fleet.bed.host("roll-2").sh("systemctl is-active vllm@a", check=False).stdout
        assert unit.strip() == "inactive"
        done = fleet.run("deploy.py")
        assert done.returncode == 0, done.stdout
        assert "this host is held by root (card 3)" in done.stdout
        unit = fleet.bed.host("roll-2").sh("systemctl is-active vllm@a", check=False).stdout
        assert unit.strip() == "inactive"
        done = fleet.run("maintain.py", *only, "do=return")
        assert done.returncode == 0, done.stdout
    kept_serving(watched)
    assert fleet.answers_while_out(watched) == []
    done = fleet.run("deploy.py")
    assert "is held" not in done.stdout


def test_a_vllm_started_by_hand_is_taken_over_when_told(fleet: RollingFleet) -> None:
    host = fleet.bed.host("roll-2")
    version = fleet.releases()["roll-2/a"]
    fleet.wants(version)
    # Somebody's own, on the port of ours, with a request that takes a while.
    start = host.sh("sed -n 's/^exec //p' /etc/vllm/a.sh").stdout.split()[0]
    host.sh(
        "systemctl disable -q --now vllm@a; rm -rf /etc/vllm/a.* /var/lib/vllm/a "
        "/var/lib/vllm/_rollout/instances/a.json /etc/systemd/system/vllm@a.service.d; "
        f"setsid nohup {start} serve /nowhere --served-model-name {MANY} --port 8001 "
        ">/root/hand.log 2>&1 </dev/null & sleep 5"
    )
    ask = json.dumps({"model": MANY, "messages": [{"role": "user", "content": "x"}], **LONG})
    host.sh(
        "nohup curl -s -H 'Content-Type: application/json' 127.0.0.1:8001/v1/chat/completions "
        f"-d '{ask}' >/root/answer 2>&1 </dev/null &"
    )
    refused = fleet.run("deploy.py")
    assert refused.returncode == 1
    assert "port 8001 of instance a is taken by pid" in refused.stdout
    assert "deploy.py --data adopt=roll-2/a" in refused.stdout
    with fleet.watched() as watched:
        done = fleet.run("deploy.py", "--data", "adopt=roll-2/a")
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == dict.fromkeys(INSTANCES, version)
    kept_serving(watched)
    assert '"finish_reason": "length"' in host.sh("cat /root/answer").stdout
    kept = json.loads(host.sh("cat /var/lib/vllm/_rollout/adopted-a.json").stdout)
    assert "8001" in kept["processes"][0]["command"]
    again = fleet.run("deploy.py")
    for name, (success, error, _) in changes(again.stdout).items():
        assert (success, error) == ("-", "-"), name
