"""Versions rolled through three hosts under constant load: upgrade.py, rollback.py, deploy.py.

The engine is the stand-in; everything around it is real. The tests share one fleet and run in
the order in which they stand here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.integration.operators import changes
from tests.integration.rolling import (
    INSTANCES,
    MANY,
    RollingFleet,
    Watched,
    make,
    served,
    told,
)
from tests.testbed.bed import Bed
from tests.testbed.standin_wheel import Behaviour

pytestmark = [pytest.mark.long, pytest.mark.faults, pytest.mark.timeout(600)]

OLD, NEW = dict.fromkeys(INSTANCES, "0.31.0"), dict.fromkeys(INSTANCES, "0.32.0")


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Three hosts that serve 0.31.0."""
    fleet = make(empty_bed, tmp_path_factory.mktemp("rolling"))
    with served(fleet):
        fleet.wants("0.31.0")
        done = fleet.run("deploy.py")
        assert done.returncode == 0, done.stdout
        yield fleet
    for name in [*fleet.bed.hosts]:
        if name.startswith("roll-"):
            fleet.bed.remove(name)


def kept_serving(watched: Watched) -> None:
    """Whether no request failed, and no pool of several lost more than one."""
    assert len(watched.load.answers) > 20
    assert not watched.load.bad, told(watched.load.bad)
    assert len(watched.seen) > 20
    assert watched.most_out(MANY) <= 1


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


# The others need longer than CI has.
QUICK = ("does not start", "an option less")


@pytest.mark.parametrize(
    "how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.long) for how in WORSE]
)
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
        tried = {line["request_id"]: line["tried"] for line in fleet.access_log(watched.began)}
        assert {tried.get(one.id) for one in bad} <= {canary}
        assert len(bad) <= 8, told(bad)
    else:
        kept_serving(watched)


# --- good ----------------------------------------------------------------------------------


def test_an_upgrade_loses_no_request_and_keeps_its_order(fleet: RollingFleet) -> None:
    # 1.3 times slower passes.
    fleet.wants("0.32.0", Behaviour(tokens_per_second=154))
    with fleet.watched() as watched:
        done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == NEW
    kept_serving(watched)
    assert fleet.answers_while_out(watched) == []
    assert {name for name in INSTANCES if watched.spells_out(name)} == {*INSTANCES}
    run = fleet.audit()[-1]["run"]
    lines = fleet.audit(run)
    # The canaries of both pools first, then the others, each as declared.
    order = ["roll-3/a", "roll-1/c", "roll-3/b", "roll-1/a", "roll-2/a"]
    assert [f"{line['host']}/{line['instance']}" for line in lines] == order
    for line in lines:
        rest = line["seconds"] - sum(line["parts"].values())
        print(
            f"{line['host']}/{line['instance']}: {line['seconds']} s, {line['parts']}, "
            f"overhead {rest:.1f} s"
        )
        assert rest < 15  # 5 on a machine that has nothing else to do


def test_a_second_upgrade_does_nothing(fleet: RollingFleet) -> None:
    fleet.wants("0.32.0")
    before, began = fleet.audit(), time.monotonic()
    done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    assert time.monotonic() - began < 20
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


# --- cut off -------------------------------------------------------------------------------


@pytest.mark.long
def test_killed_anywhere_a_second_run_ends_it(fleet: RollingFleet) -> None:
    fleet.wants("0.32.2")
    flags: list[str] = []
    with fleet.watched() as watched:
        for line in (
            r"a: stopped",
            r"roll-3/a: serves; watched",
            r"wave 3 of .*",
            r"roll-2/a: .*KV cache",
        ):
            said = fleet.killed_at("upgrade.py", line, *flags)
            assert "Traceback" not in said
            refused = fleet.run("upgrade.py")
            assert refused.returncode == 1
            (run,) = set(re.findall(r"run (\d{4}-\d{6}-\w{4}), since", refused.stdout))
            flags = ["--data", f"unlock={run}"]
        done = fleet.run("upgrade.py", *flags)
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == dict.fromkeys(INSTANCES, "0.32.2")
    assert not watched.load.bad, told(watched.load.bad)
    assert len(watched.load.answers) > 100
    assert fleet.answers_while_out(watched) == []
    assert watched.most_out(MANY) <= 1
    assert all(fleet.record(name)["step"] is None for name in INSTANCES)


@pytest.mark.long
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
