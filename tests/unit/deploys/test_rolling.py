"""upgrade.py, rollback.py and rolling deploys on @fake hosts, through pyinfra's command line.

What pyinfra itself would do is at stake here: hosts in random order, work that goes on after a
failure, restarts that get lost, retries that end as success.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit import fleets
from tests.unit.fleets import state, unit
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import Inputs
from vllm_fleet.spec.load import load_fleet
from vllm_fleet.state import HostState

pytestmark = pytest.mark.deploys
REPO = Path(__file__).resolve().parents[3]
# Declared against the alphabet, so that no order comes out right by chance.
HOSTS = ("gpu-3", "gpu-1", "gpu-2")
GATEWAY = "gw-1"
INVENTORY = """\
import json as _json
import re as _re
from pathlib import Path as _Path

_root = _Path(__file__).parent.parent
_states = _json.loads((_root / "states.json").read_text())
_answers = _json.loads((_root / "answers.json").read_text())


class _Answer(dict):
    # pyinfra's fake connector asks for "success" once for each command that it runs
    def __init__(self, host, what, found):
        super().__init__(found)
        self.line = f"{host} {what}"

    def get(self, key, default=None):
        if key == "success":
            with open(_root / "log", "a") as file:
                file.write(self.line + "\\n")
        return super().get(key, default)


def _host(name, address, **more):
    answers = {"What a host is like now": {"stdout": [_states[name]]}}
    for what, found in {**_answers["*"], **_answers.get(name, {})}.items():
        answers[what] = _Answer(name, what, found)
    answers[_re.compile("vllm_fleet|apply|systemctl")] = _Answer(name, "other", {})
    data = {"fake_delay": 0, "fake_delay_jitter": 0, "address": address, "fake_responses": answers}
    return (f"@fake/{name}", {**data, **more})

gpu = [_host("gpu-3", "10.0.0.3"), _host("gpu-1", "10.0.0.1"), _host("gpu-2", "10.0.0.2")]
gateway = [_host("gw-1", "10.0.0.9")]
"""
VARS = """\
vllm_version: "0.31.0"
models: {glm: {repo: ZhipuAI/GLM-4-9B-0414, revision: v1}}
instances:
  - {name: a, hosts: ["@fake/gpu-3", "@fake/gpu-1", "@fake/gpu-2"], model: glm, cards: [0, 1],
     port: 8001}
rollout: {canary_hold_seconds: 1, minimum_healthy_seconds: 0}
"""
OLD = {"release": "0.31.0-open", "checksum": "of the old one"}
PROBE = {"asked": 3, "failures": [], "tokens_per_second": 60.0, "first_token_seconds": 0.1}


def result(found: Any) -> dict[str, Any]:
    return {"stdout": ["a: something", "result " + json.dumps(found)]}


def answers() -> dict[str, dict[str, Any]]:
    """What the scripts find when everything goes well, by the end of their command line."""
    known = {"pool": "glm", "ready": True, "draining": False, "in_flight": 0}
    now = {"active": True, "ready": True, "checksum": OLD["checksum"]}
    ids = {f"@fake/{name}/a": known for name in HOSTS}
    found: dict[str, Any] = {
        "ledger lock": {"taken": True},
        "ledger release": {"released": True},
        "ledger audit": {},
        "ledger unlock": {"unlocked": True, "holder": {"who": "ann"}},
        "ledger forget": {"cleared": ["a"]},
        "gateways status": {"instances": ids},
        "gateways drain": {"in_flight": 0, "seconds": 0.2},
        "gateways undrain": {"ready": True},
        "gateways counts": {"answered": 9, "failed": 0},
        "switch stage": {},
        "switch begin": {"now": now, "step": {"served": True, "drained": False}, "goods": [OLD]},
        "switch measured": {},
        "switch switch": {"ok": True, "figures": {"load_seconds": 9.0, "warm_seconds": 2.0}},
        "switch watch": {"ok": True},
        "switch accept": {},
        "switch settle": {},
        "switch refuse": {},
        "switch journal": {"lines": ["ValueError: No available memory for the cache blocks"]},
        "acceptance acceptance": PROBE,
        "rehearse rehearse": {"ok": True},
        "care halt": {"served": True},
        "care hold": {},
        "care unhold": {},
        "care resume": {"ok": True, "probe": PROBE, "good_figures": {}, "figures": {}},
    }
    return {"*": {what: result(one) for what, one in found.items()}}


def settled(plan: HostPlan) -> dict[str, Any]:
    """Changes that make a host be as a plan wants it, with both releases, everything running."""
    releases = {r: {"version": r.split("-")[0]} for r in ("0.31.0-open", "0.32.0-open")}
    return {**fleets.settled(plan), "releases": releases}


@dataclass
class Operator:
    """A directory of group_vars and fake hosts that serve 0.31.0."""

    root: Path
    answers: dict[str, dict[str, Any]] = field(default_factory=answers)
    states: dict[str, HostState] = field(default_factory=dict)
    inventory: str = INVENTORY

    def __post_init__(self) -> None:
        for folder in ("inventory", "group_vars"):
            (self.root / folder).mkdir()
        for name in ("upgrade.py", "rollback.py", "maintain.py", "deploy.py", "config.py"):
            (self.root / name).write_text((REPO / name).read_text())
        self.wants(VARS)
        self.states = {name: state(hostname=name) for name in (*HOSTS, GATEWAY)}
        self.write()
        for name, plan in self.plans().items():
            short = name.removeprefix("@fake/")
            self.states[short] = state(hostname=short, **settled(plan))

    def wants(self, text: str) -> None:
        """Write group_vars."""
        (self.root / "group_vars/all.yml").write_text(text)

    def plans(self) -> dict[str, HostPlan]:
        fleet = load_fleet(str(self.root / "inventory/prod.py"))
        states = {f"@fake/{name}": one for name, one in self.states.items()}
        return plan_fleet(fleet, states, Inputs())

    def remembers(self, host: str, **record: Any) -> None:
        """What a host's record of instance `a` says."""
        kept = {"pool": "glm", "goods": [], "refused": [], "step": None, **record}
        self.states[host].rollout["a"] = kept

    def write(self) -> None:
        texts = {name: json.dumps(asdict(one)) for name, one in self.states.items()}
        (self.root / "states.json").write_text(json.dumps(texts))
        (self.root / "answers.json").write_text(json.dumps(self.answers))
        (self.root / "inventory/prod.py").write_text(self.inventory)

    def run(self, deploy: str, *flags: str, seed: int = 0) -> subprocess.CompletedProcess[str]:
        self.write()
        (self.root / "log").write_text("")
        return subprocess.run(
            [sys.executable, "-m", "pyinfra", *flags, "inventory/prod.py", deploy],
            cwd=self.root,
            env={
                **os.environ,
                "PYTHONPATH": str(REPO),
                "PYINFRA_PROGRESS": "off",
                "PYTHONHASHSEED": str(seed),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def did(self, *what: str) -> list[str]:
        """Hosts and scripts that were run, in order."""
        lines = (self.root / "log").read_text().splitlines()
        return [line for line in lines if not what or line.split(" ", 1)[1] in what]


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    one = Operator(tmp_path)
    one.wants(VARS.replace("0.31.0", "0.32.0"))
    return one


@pytest.mark.parametrize("seed", [1, 2])
def test_hosts_change_in_the_order_of_the_inventory_whatever_pyinfras_is(
    operator: Operator, seed: int
) -> None:
    done = operator.run("upgrade.py", "-y", seed=seed)
    assert done.returncode == 0, done.stderr
    assert operator.did("switch switch") == [f"{name} switch switch" for name in HOSTS]
    assert operator.did("ledger lock", "ledger release") == [
        "gw-1 ledger lock",
        "gw-1 ledger release",
    ]
    assert "3 instances changed" in done.stderr
    assert "load - -> 9 s, warm-up - -> 2 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_goes_on_after_a_failure_of_the_canary(operator: Operator) -> None:
    operator.answers["gpu-3"] = {
        "switch switch": result({"ok": False, "why": "failed to start (exit-code, 2 tries)"})
    }
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 1
    assert set(operator.did("switch switch")) == {"gpu-3 switch switch"}
    assert (
        operator.did("gateways drain", "switch begin", "switch refuse").count("gpu-3 switch begin")
        == 1
    )
    assert not any(line.startswith(("gpu-1 switch b", "gpu-2 switch b")) for line in operator.did())
    assert "not begun, and as they were: @fake/gpu-1/a, @fake/gpu-2/a" in done.stderr
    assert "failed to start (exit-code, 2 tries)" in done.stderr
    assert "cause:" in done.stderr  # of its log, from the table of known failures
    assert "gw-1 ledger release" in operator.did()
    logs = list((operator.root / "rollout-logs").glob("*/*.log"))
    assert "No available memory" in logs[0].read_text()


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("switch watch", {"stdout": ["a: fine"]}),  # exit code 0, but no result
        ("switch switch", {"stdout": ["refused a: its port is held by pid 7 of bob"]}),
    ],
)
def test_a_gate_that_gives_no_result_is_no_success(
    operator: Operator, script: str, answer: dict[str, Any]
) -> None:
    operator.answers["gpu-3"] = {script: answer}
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 1
    assert "gpu-3 switch accept" not in operator.did()
    assert not any(line.startswith("gpu-1 switch switch") for line in operator.did())


def test_what_an_earlier_run_left_is_ended_by_the_next_one(operator: Operator) -> None:
    """pyinfra would find every file as wanted, and restart nothing."""
    plan = operator.plans()["@fake/gpu-1"]
    version = {"release": "0.32.0-open", "checksum": plan.checksums["a"]}
    operator.states["gpu-1"].instances["a"].update(running=version["checksum"], ready=True)
    operator.states["gpu-1"].instances["a"]["release"] = "0.32.0-open"
    operator.remembers("gpu-1", goods=[OLD], step={"name": "swapping", "to": version})
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 0, done.stderr
    assert operator.did("switch accept") == [
        f"{name} switch accept" for name in ("gpu-1", "gpu-3", "gpu-2")
    ]
    # deploy.py leaves it alone, and says what to do.
    done = operator.run("deploy.py", "-y")
    assert done.returncode == 0, done.stderr
    assert "was cut off: run upgrade.py, or rollback.py" in done.stderr
    assert operator.did("switch switch") == []


def test_a_dry_run_tells_the_plan_and_touches_nothing(operator: Operator) -> None:
    done = operator.run("upgrade.py", "--dry")
    assert done.returncode == 0, done.stderr
    assert operator.did() == []
    assert done.stderr.count("wave 1 of 3 (canary, then watched for 1 s):") == 1
    assert "@fake/gpu-3/a of glm: 0.31.0-open (" in done.stderr
    assert done.stderr.index("gpu-3/a of glm") < done.stderr.index("gpu-1/a of glm")


def test_a_second_upgrade_does_nothing(operator: Operator) -> None:
    operator.wants(VARS)
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 0, done.stderr
    assert operator.did() == []
    assert "Starting operation: Instances to another version" not in done.stderr


def test_two_operators_at_once(operator: Operator) -> None:
    holder = {"who": "ann", "run": "r1", "where": "pc pid 7", "what": "upgrade.py", "since": 1}
    held = {"taken": False, "holder": {**holder, "silent": 3.0, "stale": False}}
    operator.answers["gw-1"] = {"ledger lock": result(held)}
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 1
    assert "being changed by ann (pc pid 7): upgrade.py, run r1" in done.stderr
    assert "Wait until that run has ended" in done.stderr
    assert operator.did("switch stage", "switch begin", "ledger release") == []


def test_a_stale_lock_is_taken_only_when_told(operator: Operator) -> None:
    holder = {"who": "ann", "run": "1201-1", "where": "pc", "what": "upgrade.py", "since": 1}
    held = {"taken": False, "holder": {**holder, "silent": 900.0, "stale": True}}
    operator.answers["gw-1"] = {"ledger lock": result(held)}
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 1
    assert "run again with --data unlock=1201-1" in done.stderr
    assert operator.did("ledger unlock") == []
    del operator.answers["gw-1"]
    done = operator.run("upgrade.py", "-y", "--data", "unlock=1201-1")
    assert done.returncode == 0, done.stderr
    assert operator.did("ledger unlock", "ledger lock") == [
        "gw-1 ledger unlock",
        "gw-1 ledger lock",
    ]


def test_with_a_limit_the_gateway_is_reached_all_the_same(operator: Operator) -> None:
    done = operator.run("upgrade.py", "-y", "--limit", "@fake/gpu-1")
    assert done.returncode == 0, done.stderr
    assert operator.did("switch switch") == ["gpu-1 switch switch"]
    drained = operator.did("ledger lock", "gateways drain", "gateways undrain")
    assert drained == [
        "gw-1 ledger lock",
        "gw-1 gateways drain",
        "gw-1 gateways undrain",
    ]


def test_a_gateway_that_cannot_be_reached_refuses_all_of_it(operator: Operator) -> None:
    lost = '("gw-lost", {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "address": "10.0.0.8"})'
    operator.inventory = INVENTORY.replace("gateway = [", f"gateway = [{lost}, ")
    done = operator.run("upgrade.py", "-y", "--limit", "gpu")
    assert done.returncode == 1
    assert "nothing was changed: gateways and the host of the lock must be reached" in done.stderr
    assert "gw-lost" in done.stderr
    assert operator.did("switch begin", "ledger lock", "gateways drain") == []


def test_deploy_stages_a_version_and_leaves_what_runs(operator: Operator) -> None:
    done = operator.run("deploy.py", "-y")
    assert done.returncode == 0, done.stderr
    assert "runs 0.31.0-open, group_vars want 0.32.0-open: staged; `upgrade.py` moves it" in (
        done.stderr
    )
    assert operator.did() == []


def test_deploy_rolls_other_settings_through_the_same_gates(operator: Operator) -> None:
    operator.wants(VARS.replace("revision: v1}", "revision: v1, vllm_args: {max-num-seqs: 8}}"))
    done = operator.run("deploy.py", "-y")
    assert done.returncode == 0, done.stderr
    assert operator.did("switch switch") == [f"{name} switch switch" for name in HOSTS]
    assert len(operator.did("gateways drain")) == 3
    assert len(operator.did("acceptance acceptance")) == 6
    # Not one of their files was put beside it, where a crash would have started it too early.
    # (The gateway's file tells how many requests an instance takes at once: that one changes.)
    assert {line for line in operator.did() if "other" in line} <= {f"{GATEWAY} other"}


def test_the_only_instance_that_starts_too_slowly_is_refused_before_anything(
    operator: Operator,
) -> None:
    one = '["@fake/gpu-3"]'
    text = VARS.replace('["@fake/gpu-3", "@fake/gpu-1", "@fake/gpu-2"]', one)
    text = text.replace("cards: [0, 1]", "cards: [0, 1, 2, 3]")  # none is free for a spare
    operator.wants(text.replace("0.31.0", "0.32.0"))
    for name in ("gpu-1", "gpu-2"):
        operator.states[name] = state(hostname=name)
    operator.states["gpu-3"].instances["a"]["start_seconds"] = 2000.0
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 1
    assert "the only instance of pool glm" in done.stderr
    assert "nothing was changed" in done.stderr
    assert "Starting operation" not in done.stderr
    assert operator.did() == []


def test_a_host_is_held_and_returned_with_the_gateway_outside_the_limit(
    operator: Operator,
) -> None:
    only = ("--limit", "@fake/gpu-1", "-y", "--data")
    done = operator.run("maintain.py", *only, "do=hold", "--data", "why=card 3")
    assert done.returncode == 0, done.stderr
    mine = [line for line in operator.did() if "ledger" not in line]
    assert mine == [
        "gw-1 gateways status",
        "gw-1 gateways drain",
        "gpu-1 care halt",
        "gpu-1 care hold",
    ]
    done = operator.run("maintain.py", *only, "do=return")
    assert done.returncode == 0, done.stderr
    mine = [line for line in operator.did() if "ledger" not in line]
    assert mine == [
        "gpu-1 care unhold",
        "gpu-1 care resume",
        "gpu-1 switch watch",
        "gpu-1 acceptance acceptance",
        "gw-1 gateways undrain",
    ]


def test_maintenance_wants_to_be_told_what_to_do(operator: Operator) -> None:
    for flags in ((), ("--data", "do=reinstall")):
        done = operator.run("maintain.py", "-y", *flags)
        assert done.returncode == 1
        assert "--data do=reboot or hold or return" in done.stderr
        assert operator.did() == []


def test_a_held_host_is_left_alone_by_deploy_and_upgrade(operator: Operator) -> None:
    units = {**operator.states["gpu-3"].units, "vllm@a.service": unit("inactive")}
    held = {"who": "ann", "why": "card 3"}
    operator.states["gpu-3"] = replace(operator.states["gpu-3"], held=held, units=units)
    done = operator.run("deploy.py", "-y")
    assert done.returncode == 0, done.stderr
    assert "this host is held by ann (card 3)" in done.stderr
    assert operator.did() == []
    # Its pool misses it: nobody else of it is taken out, unless told.
    operator.wants(VARS.replace("0.31.0", "0.32.0"))
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 1
    assert "@fake/gpu-3/a of it does not serve" in done.stderr
    assert operator.did("switch switch") == []
    operator.wants(
        VARS.replace("0.31.0", "0.32.0").replace("rollout: {", "rollout: {most_out: 2, ")
    )
    done = operator.run("upgrade.py", "-y")
    assert operator.did("switch switch") == ["gpu-1 switch switch", "gpu-2 switch switch"]


BAD = {"release": "0.32.0-open", "checksum": "x", "why": "3 times slower", "by_release": True}


def test_a_refused_release_stays_away_until_cleared(operator: Operator) -> None:
    operator.remembers("gpu-3", goods=[OLD], refused=[BAD])
    done = operator.run("deploy.py", "-y")
    assert done.returncode == 0, done.stderr
    assert "0.32.0-open is refused: 3 times slower" in done.stderr
    assert operator.did() == []
    done = operator.run("upgrade.py", "-y")
    assert done.returncode == 1
    assert "--data clear=0.32.0-open" in done.stderr
    assert operator.did("switch stage") == []
    done = operator.run("upgrade.py", "-y", "--data", "clear=0.32.0-open")
    assert len(operator.did("ledger forget")) == 4


def test_rollback_takes_back_the_last_change_and_nothing_older(operator: Operator) -> None:
    older = {"release": "0.30.0-open", "checksum": "older", "at": 1, "run": "r1"}
    for name in ("gpu-3", "gpu-1"):
        checksum = f"new of {name}"
        operator.states[name].instances["a"].update(running=checksum, release="0.32.0-open")
        good = {"release": "0.32.0-open", "checksum": checksum, "at": 9, "run": "r2"}
        operator.remembers(name, goods=[good, {**OLD, "at": 5}, older])
    running = operator.states["gpu-2"].instances["a"]["running"]
    same = {"release": "0.31.0-open", "checksum": running, "at": 5, "run": "r1"}
    operator.remembers("gpu-2", goods=[same, older])
    for script in ("measured", "accept"):
        operator.answers["*"][f"switch {script}"] = {"success": False}
    done = operator.run("rollback.py", "-y")
    assert done.returncode == 0, done.stderr
    assert operator.did("switch switch", "switch settle") == [
        f"{name} switch {what}" for name in ("gpu-3", "gpu-1") for what in ("switch", "settle")
    ]
    assert operator.did("switch refuse") == ["gpu-3 switch refuse", "gpu-1 switch refuse"]
    assert operator.did("acceptance acceptance", "switch stage") == []


def test_rollback_works_while_group_vars_are_refused(operator: Operator) -> None:
    operator.wants(VARS.replace("0.31.0", "0.32.0").replace("[0, 1]", "[0, 9]"))
    good = {"release": "0.32.0-open", "checksum": "n", "at": 9, "run": "r2"}
    operator.states["gpu-3"].instances["a"].update(running="n", release="0.32.0-open")
    operator.remembers("gpu-3", goods=[good, {**OLD, "at": 5}])
    done = operator.run("rollback.py", "-y")
    assert done.returncode == 0, done.stderr
    assert operator.did("switch switch") == ["gpu-3 switch switch"]


def test_rollback_without_anything_to_take_back_does_nothing(operator: Operator) -> None:
    done = operator.run("rollback.py", "-y")
    assert done.returncode == 0, done.stderr
    assert operator.did() == []
