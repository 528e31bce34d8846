"""The rollout with the real scripts on one host's real files: what one says, the other reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import state
from tests.unit.rollout.hosts import Host, texts_of
from vllm_fleet.onhost import apply, instances, ledger, switch
from vllm_fleet.onhost import state as fact
from vllm_fleet.rollout.hosts import Failed
from vllm_fleet.rollout.lock import Holder, Lock
from vllm_fleet.rollout.policy import Standing, Version, plan_rollout
from vllm_fleet.rollout.roll import Roll, Target
from vllm_fleet.rollout.state import goes_back, record_of, refusals, standing
from vllm_fleet.spec.model import Rollout as Settings
from vllm_fleet.state import HostState

SETTINGS = Settings(canary_hold_seconds=1, minimum_healthy_seconds=0)
PROBE = {"asked": 3, "failures": [], "tokens_per_second": 60.0}


class OneHost:
    """The scripts in this process; gateway and probe are answered here."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.draining = False
        self.probes: list[dict[str, Any]] = []
        self.said: list[str] = []

    def ask(self, host: str, script: str, order: Mapping[str, Any]) -> dict[str, Any]:
        asked = json.loads(json.dumps(order))
        try:
            if script == "switch":
                with ledger.guarded("a"):
                    found: Any = switch.ACTIONS[asked["action"]](asked)
            elif script == "ledger":
                with ledger.guarded():
                    found = ledger.ACTIONS[asked["action"]](asked)
            elif script == "acceptance":
                found = self.probes.pop(0) if self.probes else PROBE
            else:
                found = self.gateway(asked)
        except ledger.Refused as error:
            raise Failed(str(error)) from None
        answer: dict[str, Any] = json.loads(json.dumps(found))
        return answer

    def gateway(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["action"] in ("drain", "undrain"):
            self.draining = order["action"] == "drain"
        ready = (self.host.root / "run/a/ready").exists()
        one = {"pool": "glm", "ready": ready, "draining": self.draining, "in_flight": 0}
        return {
            "instances": {"g1/a": one},
            "ready": ready,
            "in_flight": 0,
            "answered": 0,
            "failed": 0,
        }

    def say(self, text: str) -> None:
        self.said.append(text)

    def save(self, name: str, lines: Sequence[str]) -> str:
        return name


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneHost:
    host = Host(tmp_path, monkeypatch)
    monkeypatch.setattr(instances, "journal", lambda unit, since: ["it broke"])
    for name in ("STATE", "RUN", "ETC"):
        monkeypatch.setattr(fact, name, getattr(switch, name))
    return OneHost(host)


def looked_at(hosts: OneHost) -> HostState:
    """The host as the fact tells of it."""
    unit = {"vllm@a.service": {**hosts.host.unit, "UnitFileState": "enabled"}}
    return state(units=unit, instances=fact.instances(), rollout=fact.rollout())


def one(hosts: OneHost, wanted: Version) -> Standing:
    there = looked_at(hosts)
    return standing(there, "g1", "a", "glm", wanted, refusals([there]))


def version(made: dict[str, Any]) -> Version:
    return Version(made["release"], made["checksum"])


def rolled(hosts: OneHost, who: Standing, made: dict[str, Any] | None) -> bool:
    rollout = plan_rollout([who], SETTINGS, 900)
    assert not rollout.refusals
    target = Target(who, made, who.wanted, 8001, "glm", "chat", False, 60, 30)
    with Lock(hosts, "gw", Holder("test"), beat_seconds=3600) as lock:
        back = made is None
        roll = Roll(hosts, ["gw"], SETTINGS, lock, {who.id: target}, back=back)
        roll.stage(rollout)
        return roll.run(rollout)


def takes_back(hosts: OneHost) -> list[Standing]:
    there = looked_at(hosts)
    return goes_back([one(hosts, Version("", ""))], {"g1/a": record_of(there, "a")})


def test_there_and_back_again_with_the_real_scripts(hosts: OneHost) -> None:
    old, new = hosts.host.version("0.31", plan=True), hosts.host.version("0.32")
    hosts.host.deploy(old)
    assert rolled(hosts, one(hosts, version(new)), new)
    assert hosts.host.texts() == texts_of(new)
    assert one(hosts, version(new)).as_wanted
    assert not hosts.draining
    assert "g1/a: started: load 3 s -> 3 s, warm-up 1 s -> 1 s" in hosts.said

    (back,) = takes_back(hosts)
    assert back.wanted == version(old)
    assert rolled(hosts, back, None)
    assert hosts.host.texts() == texts_of(old)
    assert one(hosts, version(new)).refused.startswith("rolled back by")
    assert one(hosts, version(old)).as_wanted
    assert takes_back(hosts) == []
    assert json.loads(Path(apply.MANIFEST).read_text()) == apply.checksums(old["files"])
    log = (Path(ledger.ROOT) / "audit.log").read_text().splitlines()
    # On its host and once for the gateways, which is the same place here.
    assert [json.loads(line)["result"] for line in log] == ["done"] * 4
    marks = {path.name for path in Path(ledger.METRICS).iterdir()}
    assert marks == {"vllm_fleet_change_a.prom", "vllm_fleet_rollout.prom"}


@pytest.mark.parametrize("how", ["does not start", "is slow"])
def test_a_worse_version_goes_back_with_the_real_scripts(hosts: OneHost, how: str) -> None:
    old, new = hosts.host.version("0.31", plan=True), hosts.host.version("0.32")
    hosts.host.deploy(old)
    if how == "is slow":
        hosts.probes = [PROBE, *[{**PROBE, "tokens_per_second": 20.0}] * 2]
    else:
        hosts.host.bad.add("0.32")
    assert not rolled(hosts, one(hosts, version(new)), new)
    assert hosts.host.texts() == texts_of(old)
    assert hosts.host.unit["ActiveState"] == "active"
    assert not hosts.draining
    found = one(hosts, version(new))
    assert found.refused
    assert found.cut_off is None
    assert takes_back(hosts) == []


def test_a_foreign_process_on_the_port_is_named_and_the_old_version_comes_back(
    hosts: OneHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = hosts.host.version("0.31"), hosts.host.version("0.32")
    hosts.host.deploy(old)
    held = [ledger.Refused("its port or cards are held by pid 7 of bob: python")]

    def free(name: str, env: dict[str, str]) -> None:
        if held:
            raise held.pop()

    monkeypatch.setattr(switch, "free", free)
    assert not rolled(hosts, one(hosts, version(new)), new)
    assert "held by pid 7 of bob" in "\n".join(hosts.said)
    assert hosts.host.texts() == texts_of(old)
    assert not one(hosts, version(new)).refused  # it is not the version's fault
