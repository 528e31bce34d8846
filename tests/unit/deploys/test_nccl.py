"""nccl.py on @fake hosts, through pyinfra's command line: what is shown, asked, kept, put back."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploys.test_rolling import HOSTS, REPO, VARS, Operator, answers, result, settled
from tests.unit.fabric.listings import ib, nic
from tests.unit.fleets import state
from vllm_fleet import fabric

pytestmark = pytest.mark.deploys
NAMES = [f"@fake/{name}" for name in HOSTS]
ADDRESSES = {"gpu-3": "10.0.0.3", "gpu-1": "10.0.0.1", "gpu-2": "10.0.0.2"}
# pyinfra asks fake hosts nothing; what a rank finds when everything goes well.
FOUND: dict[str, Any] = {
    "wrong": 0,
    "busbw_gbyte": 11.5,
    "point_to_point": {"gbyte": 10.0},
    "backend": "nccl",
    "torch": "2.11.0",
    "transports": {"NET/Socket": 4},
    "nccl": {"version": "2.28.9", "network": "Socket", "warnings": []},
    "rank": 0,
}
RANK = {"rank": 0, "code": 0, "step": "leave", "why": "", "tail": [], "ended": False}
STEPS = [
    *("fabric stage", "fabric path", "fabric ports", "fabric rank"),
    *("fabric keep", "fabric back", "fabric done"),
]


def good() -> dict[str, dict[str, Any]]:
    """What the scripts find when everything goes well."""
    seen = {"why": "", "mtu_why": "", "through": "eno1"}
    reached = {"problems": {}, "clock": [0.001, 0.0]}
    return {
        "fabric stage": result({"cut_off": None}),
        "fabric path": result({"why": "", "peers": dict.fromkeys(NAMES, seen)}),
        "fabric ports": result({"taken": {}, "peers": dict.fromkeys(NAMES, reached)}),
        "fabric rank": result({"ranks": [{**RANK, "result": FOUND}]}),
        "fabric end": result({"ended": 1}),
        "fabric keep": result({}),
        "fabric back": result({"changed": True}),
        "fabric done": result({}),
    }


def text(name: str) -> str:
    """What a host is to have."""
    return fabric.text_of(
        {
            "GLOO_SOCKET_IFNAME": "eno1",
            "NCCL_SOCKET_IFNAME": "=eno1",
            "NCCL_IB_DISABLE": "1",
            "VLLM_HOST_IP": ADDRESSES[name],
        }
    )


class Fabric(Operator):
    """Three hosts of one fabric that serve 0.31.0."""

    def wants_fabric(self, settings: str = "{}") -> None:
        self.wants(VARS + f"nccl: {settings}\n")
        # Files follow from it, those of the firewall above all.
        for name, plan in self.plans().items():
            short = name.removeprefix("@fake/")
            before = self.states[short]
            self.states[short] = state(
                hostname=short,
                **settled(plan),
                nics=before.nics,
                fabric=before.fabric,
                texts=before.texts,
                libraries=before.libraries,
            )
        self.write()

    def has(self, host: str, **changes: Any) -> None:
        self.states[host] = replace(self.states[host], **changes)


@pytest.fixture
def operator(tmp_path: Path) -> Fabric:
    one = Fabric(tmp_path)
    (one.root / "nccl.py").write_text((REPO / "nccl.py").read_text())
    one.answers = answers()
    one.answers["*"] |= good()
    for name, address in ADDRESSES.items():
        libraries = {r: {"torch": "2.11.0"} for r in one.states[name].releases}
        one.has(name, nics={"eno1": nic(f"{address}/24", speed=100000)}, libraries=libraries)
    one.wants_fabric()
    return one


def tested(operator: Fabric) -> None:
    """Every host has what it is to have, and it was tested."""
    for name in HOSTS:
        sha256 = hashlib.sha256(text(name).encode()).hexdigest()
        operator.has(
            name,
            texts={fabric.FILE: text(name)},
            fabric={"tested": {"hosts": NAMES, "sha256": sha256}},
        )


def test_dry_shows_old_and_new_of_every_host_and_asks_none(operator: Fabric) -> None:
    operator.has("gpu-1", texts={fabric.FILE: 'NCCL_SOCKET_IFNAME="eth0"\nNCCL_DEBUG="INFO"\n'})
    done = operator.run("nccl.py", "--dry")
    assert done.returncode == 0, done.stderr
    assert "@fake/gpu-1: NCCL_SOCKET_IFNAME: eth0 → =eno1" in done.stderr
    assert "@fake/gpu-1: NCCL_DEBUG: INFO → unset" in done.stderr
    assert "@fake/gpu-3: VLLM_HOST_IP: unset → 10.0.0.3" in done.stderr
    assert operator.did() == []


def test_all_steps_on_all_hosts_then_kept(operator: Fabric) -> None:
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 0, done.stderr
    assert sorted(operator.did(*STEPS)) == sorted(
        f"{name} {step}" for name in HOSTS for step in STEPS if step != "fabric back"
    )
    order = [line.split(" ", 1)[1] for line in operator.did(*STEPS)]
    assert order[:3] == ["fabric stage"] * 3
    assert order[-6:] == ["fabric keep"] * 3 + ["fabric done"] * 3
    assert "12 ranks" not in done.stderr
    assert "all-reduce of 3 ranks by nccl: right sums, 11.5 GB/s" in done.stderr
    assert "gw-1 ledger release" in operator.did()


def test_nothing_is_done_where_it_was_tested(operator: Fabric) -> None:
    tested(operator)
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 0, done.stderr
    assert operator.did() == []
    assert "as it should be, and was tested" in done.stderr
    done = operator.run("nccl.py", "-y", "--data", "test=yes")
    assert done.returncode == 0, done.stderr
    assert "gpu-2 fabric rank" in operator.did()


def test_a_change_that_was_cut_off_is_begun_anew(operator: Fabric) -> None:
    tested(operator)
    known = operator.states["gpu-2"].fabric
    operator.has("gpu-2", fabric={**known, "change": {"run": "r1"}})
    operator.answers["gpu-2"] = {"fabric stage": result({"cut_off": "r1"})}
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 0, done.stderr
    assert "@fake/gpu-2: run r1 was cut off here: begun anew" in done.stderr


@pytest.mark.parametrize(
    ("step", "found", "told"),
    [
        (
            "fabric ports",
            {"taken": {"29400": "pid 7"}, "peers": {}},
            "port 29400 is taken by pid 7",
        ),
        (
            "fabric rank",
            {"ranks": [{**RANK, "code": 1, "result": None, "why": "unhandled system error"}]},
            "rank 0, leave: unhandled system error",
        ),
    ],
)
def test_what_one_host_finds_puts_all_of_them_back(
    operator: Fabric, step: str, found: dict[str, Any], told: str
) -> None:
    if step == "fabric ports":
        reached = {"problems": {}, "clock": [0.001, 0.0]}
        found = {**found, "peers": dict.fromkeys(NAMES, reached)}
    operator.answers["gpu-1"] = {step: result(found)}
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 1
    assert f"@fake/gpu-1: {told}" in done.stderr
    assert sorted(operator.did("fabric back")) == sorted(f"{name} fabric back" for name in HOSTS)
    assert operator.did("fabric keep") == []
    assert "Traceback" not in done.stderr


def test_one_host_that_cannot_keep_it_puts_all_of_them_back(operator: Fabric) -> None:
    operator.answers["gpu-2"] = {"fabric keep": {"stdout": ["refused No space left on device"]}}
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 1
    assert "@fake/gpu-2: No space left on device" in done.stderr
    assert len(operator.did("fabric back")) == 3
    assert operator.did("fabric done") == []


def test_sockets_where_rdma_was_promised(operator: Fabric) -> None:
    for name in HOSTS:
        operator.has(name, rdma={"mlx5_0:1": ib()})
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 1
    assert "NCCL took NET/Socket where InfiniBand was promised" in done.stderr
    assert operator.did("fabric keep") == []


def test_refused_before_anything_is_changed(operator: Fabric) -> None:
    operator.wants_fabric("{interface: eth7}")
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 1
    assert "nothing was changed" in done.stderr
    for name in NAMES:
        assert f"{name}: nccl.interface: eth7 does not exist there; it has eno1" in done.stderr
    assert operator.did() == []


def test_versions_that_differ_are_refused(operator: Fabric) -> None:
    release = next(iter(operator.states["gpu-1"].releases))
    for name, version in {"gpu-3": "2.28.9", "gpu-1": "2.27.5", "gpu-2": "2.28.9"}.items():
        found = {r: {"torch": "2.11.0", "nccl": version} for r in operator.states[name].releases}
        operator.has(name, libraries=found)
    done = operator.run("nccl.py", "-y")
    assert release
    assert done.returncode == 1
    assert (
        "nccl differs between the nodes of one model: 2.28.9 on @fake/gpu-3, @fake/gpu-2; 2.27.5 "
        "on @fake/gpu-1" in done.stderr
    )
    assert operator.did() == []


def test_a_fabric_of_nobody_and_of_one(operator: Fabric) -> None:
    operator.wants(VARS)
    done = operator.run("nccl.py", "-y")
    assert done.returncode == 1
    assert "no host has `nccl` set" in done.stderr
    operator.wants_fabric()
    done = operator.run("nccl.py", "-y", "--limit", "@fake/gpu-1")
    assert done.returncode == 1
    assert "@fake/gpu-1 is alone: a fabric has two hosts at least" in done.stderr
    assert operator.did() == []


def test_hosts_outside_the_limit_are_told(operator: Fabric) -> None:
    done = operator.run("nccl.py", "-y", "--limit", "@fake/gpu-1", "--limit", "@fake/gpu-3")
    assert done.returncode == 0, done.stderr
    assert "@fake/gpu-2: left out by --limit: neither tested nor changed" in done.stderr
    assert "gpu-2 fabric stage" not in operator.did()
