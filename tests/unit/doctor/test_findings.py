"""Every finding: none where all is sound, and by its name, with its remedy, where it is not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.stubs.certificates import issue
from tests.unit.cards.made import matrix, uniform
from tests.unit.doctor.sound import CLOCK, KEYS, NOW, sound
from tests.unit.fleets import CARDS, unit
from vllm_fleet.doctor.case import Case, Finding
from vllm_fleet.doctor.diagnosis import diagnose, report
from vllm_fleet.doctor.entries import AREAS, ENTRIES, SHARED
from vllm_fleet.doctor.instances import missing_interfaces

GPU, GW = "gpu-1", "gw-1"
A = "vllm@glm-a.service"
DEPLOY = "pyinfra inventory/prod.py deploy.py --limit gpu-1"


def state(host: str = GPU, **fields: Any) -> Callable[[Case], Case]:
    """Fields of a host's state replaced; a function gets what was there."""

    def change(case: Case) -> Case:
        before = case.states[host]
        values = {
            k: v(getattr(before, k))
            if callable(v)
            else {**getattr(before, k), **v}
            if isinstance(v, dict)
            else v
            for k, v in fields.items()
        }
        return replace(case, states={**case.states, host: replace(before, **values)})

    return change


def said(host: str, *path: str, to: Any) -> Callable[[Case], Case]:
    """One thing that a host says to the doctor's own questions."""

    def change(case: Case) -> Case:
        found = case.answers[host]
        for part in path[:-1]:
            found = found[part]
        found[path[-1]] = to
        return case

    return change


def instance(*path: str, to: Any) -> Callable[[Case], Case]:
    return said(GPU, "instances", "glm-a", *path, to=to)


def stranger(kind: str, unit: str | None = None) -> list[dict[str, Any]]:
    who: dict[str, Any] = {
        "pid": 4711,
        "user": "bob",
        "unit": unit,
        "command": "x",
        "kind": kind,
        "workers": [],
    }
    return [who]


def held_by(case: Case) -> Case:
    holder = {
        "uuid": "GPU-0000", "memory_mib": 9000, "pid": 4711, "user": "bob", "command": "train.py",
        "unit": None,
    }  # fmt: skip
    return state(cards={"holders": [holder]})(case)


def variable(key: str, value: str, *files: str) -> Callable[[Case], Case]:
    return instance(
        "environment", to={key: {"value": value, "files": list(files), "running": value}}
    )


def log(count: int, *lines: str) -> Callable[[Case], Case]:
    return instance("restarts", to={"count": count, "log": "\n".join(lines), "last": CLOCK})


def certificate(days: int) -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        pair = issue("llm", begins=NOW, days=days)
        case.answers[GW]["gateway"]["certificate"] = pair.pem
        hosts = [
            h
            if h.name != GW
            else h.model_copy(
                update={
                    "settings": h.settings.model_copy(
                        update={
                            "gateway": type(h.settings.gateway).model_validate(
                                {"tls": {"certificate": "c.pem", "key": "k.pem"}}
                            )
                        }
                    )
                }
            )
            for h in case.fleet.hosts
        ]
        fleet = case.fleet.model_copy(update={"hosts": tuple(hosts)})
        texts = {"c.pem": pair.pem, "k.pem": pair.key_pem()}
        return replace(case, fleet=fleet, inputs=replace(case.inputs, tls=texts))

    return change


def alert(name: str, anchor: str, severity: str) -> Callable[[Case], Case]:
    one = {
        "labels": {"alertname": name, "severity": severity, "host": GPU},
        "summary": "it burns",
        "runbook": f"docs/runbook.md#{anchor}",
        "since": "2026-11-30T11:00:00Z",
    }
    return said(GW, "prometheus", "alerts", to=[one])


def target(port: int, error: str) -> list[dict[str, str]]:
    url = f"http://10.0.0.1:{port}/metrics"
    return [{"job": "node", "host": GPU, "instance": "node", "url": url, "error": error}]


def together(*changes: Callable[[Case], Case]) -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        for one in changes:
            case = one(case)
        return case

    return change


@dataclass(frozen=True)
class Broken:
    """What breaks it, where it is found, and words of evidence and of the first remedy."""

    change: Callable[[Case], Case]
    where: str = GPU
    evidence: str = ""
    remedy: str = ""
    text: str = ""


SCALED = "\n".join(CARDS.splitlines()[:2])
CASES: dict[str, Broken | tuple[Broken, ...]] = {
    "host-down": Broken(
        lambda c: replace(
            c, states={k: v for k, v in c.states.items() if k != GPU},
            answers={k: v for k, v in c.answers.items() if k != GPU},
            failures={GPU: "unreachable: no route"},
        ),
        evidence="unreachable: no route",
    ),
    "not-looked-at": Broken(
        lambda c: replace(
            c, silent={GPU: "no answer within 60 s"},
            answers={k: v for k, v in c.answers.items() if k != GPU},
        ),
        remedy="dmesg",
    ),
    "host-access": Broken(state(user="ops"), text="run as ops"),
    "host-unsupported": Broken(
        state(os={"id": "debian", "version": "10", "name": "Debian 10"}), text="Debian 10"
    ),
    "driver-unfit": Broken(
        state(cards={"error": "NVIDIA-SMI has failed because it couldn't communicate with the "
                              "NVIDIA driver"}),
        text="nvidia-smi: ",
    ),
    "card-unfit": Broken(state(cards={"csv": SCALED, "topo": matrix(uniform(1, "X"))}),
                         text="wants card 1"),
    "card-memory-taken": Broken(held_by, text="pid 4711", remedy="ssh gpu-1 'kill 4711'"),
    "port-in-use": (
        Broken(
            state(listening={"8001": {"pid": 55, "user": "bob", "command": "nc", "unit": None}}),
            text="pid 55 of bob, outside any unit: nc",
            remedy="ssh gpu-1 'kill 55'",
        ),
        Broken(
            state(listening={"8001": {"pid": 55, "user": "x", "command": "y",
                                      "unit": "apache2.service"}}),
            remedy="ssh gpu-1 'systemctl stop apache2.service'",
        ),
        Broken(  # a shell over SSH belongs to sshd, which must not be stopped
            state(listening={"8001": {"pid": 55, "user": "x", "command": "y",
                                      "unit": "ssh.service"}}),
            remedy="ssh gpu-1 'kill 55'",
        ),
    ),
    "glibc-too-old": Broken(state(glibc="2.17"), text="2.17"),
    "no-kernel-image": Broken(
        state(cards={"csv": CARDS.replace(" 8.9,", " 6.1,")}), text="instance glm-a"
    ),
    "persistenced": Broken(
        state(cards={"csv": CARDS.replace("Enabled", "Disabled")}),
        remedy="systemctl enable --now nvidia-persistenced",
    ),
    "fabric-manager": Broken(state(cards={"nvswitches": 4}), text="fabricmanager"),
    "xid-error": Broken(
        state(kernel_log=["[1] NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus"]),
        text="Xid 79",
    ),
    "iommu-faults": Broken(
        state(kernel_log=["[1] AMD-Vi: Event logged [IO_PAGE_FAULT device=01:00.0"]),
        text="IOMMU",
    ),
    "infiniband-down": Broken(
        state(rdma={"mlx5_0:1": {"state": "ACTIVE", "rate": "400"},
                    "mlx5_1:1": {"state": "DOWN", "rate": "10"}}),
        text="mlx5_1:1 has no link",
    ),
    "nccl-memlock": Broken(
        state(units={A: unit(LimitMEMLOCK="65536")}), text="65536 bytes"
    ),
    "card-links": Broken(
        state(cards={"topo": matrix([
            ["X", "SYS", "NV12", "SYS"], ["SYS", "X", "SYS", "SYS"],
            ["NV12", "SYS", "X", "SYS"], ["SYS", "SYS", "SYS", "X"]])}),
        text="linked by SYS",
    ),
    "little-room": Broken(state(memory={"total_mib": 8000, "available_mib": 4000}), text="8 GiB"),
    "group-memory-uneven": Broken(
        state(cards={"csv": CARDS.replace("46068 MiB, 4 MiB", "46068 MiB, 40000 MiB", 1)}),
        where="gpu-1/glm-a", evidence="card 0: 40000 MiB, card 1: 4 MiB", remedy="nvidia-smi -i 0",
    ),
    "gateway-down": Broken(
        state(GW, units={"nginx.service": unit("failed")}), GW,
        remedy="ssh gw-1 'systemctl enable --now nginx.service'",
    ),
    "service-stopped": Broken(
        state(GW, units={"prometheus.service": unit("inactive")}), GW,
        remedy="systemctl enable --now prometheus.service",
    ),
    "exporter-stopped": Broken(
        state(units={"prometheus-node-exporter.service": unit("inactive")}),
        remedy="systemctl enable --now prometheus-node-exporter.service",
    ),
    "timer-stopped": Broken(
        state(units={"vllm-fleet-probe.timer": unit("inactive")}),
        remedy="systemctl enable --now vllm-fleet-probe.timer",
    ),
    "firewall-off": Broken(
        state(units={"vllm-fleet-firewall.service": unit("inactive")}),
        remedy="systemctl enable --now vllm-fleet-firewall.service",
    ),
    "unit-disabled": Broken(
        state(units={A: unit("active", "disabled")}), "gpu-1/glm-a",
        remedy="ssh gpu-1 'systemctl enable vllm@glm-a.service'",
    ),
    "instance-failed": Broken(
        state(units={A: unit("failed", Result="start-limit-hit")}), "gpu-1/glm-a",
        evidence="start-limit-hit", remedy="| fleet explain -",
    ),
    "instance-stopped": Broken(
        state(units={A: unit("inactive")}), "gpu-1/glm-a", remedy="enable --now --no-block"
    ),
    "instance-starting": Broken(
        state(units={A: unit("activating", SubState="start-post")}), "gpu-1/glm-a",
        evidence="start-post",
    ),
    "instance-not-ready": Broken(
        state(instances=lambda was: {**was, "glm-a": {**was["glm-a"], "ready": False}}),
        "gpu-1/glm-a", remedy="systemctl restart vllm@glm-a",
    ),
    "unit-changed-on-disk": Broken(
        state(units={A: unit(NeedDaemonReload="yes")}),
        remedy="ssh gpu-1 'systemctl daemon-reload'",
    ),
    "host-held": Broken(
        state(held={"who": "ann", "why": "card 3"}), text="held by ann (card 3)",
        remedy="--data do=return",
    ),
    "orphan-engine": Broken(
        said(GPU, "strangers", to=stranger("engine")),
        evidence="pid 4711 of bob, outside any unit", remedy="ssh gpu-1 'kill -9 4711'",
    ),
    "started-by-hand": (
        Broken(
            said(GPU, "strangers", to=[{**stranger("server")[0], "workers": [4712, 4713]}]),
            remedy="tail --pid=4711 -f /dev/null; kill -9 4712 4713 2>/dev/null; true",
        ),
        Broken(said(GPU, "strangers", to=stranger("server")), remedy="ssh gpu-1 'kill 4711'"),
        Broken(
            said(GPU, "strangers", to=stranger("server", "old-vllm.service")),
            remedy="systemctl disable --now old-vllm.service",
        ),
    ),
    "disk-full": Broken(
        said(GPU, "disks", to=[{"mount": "/", "free_mib": 300, "free": 0.01, "inodes_free": 0.9}]),
        evidence="300 MiB free", remedy="du -xh",
    ),
    "disk-short": (
        Broken(said(GPU, "disks", to=[
            {"mount": "/", "free_mib": 9000, "free": 0.04, "inodes_free": 0.9}])),
        Broken(said(GPU, "disks", to=[
            {"mount": "/", "free_mib": 90000, "free": 0.5, "inodes_free": 0.04}]), text="inodes"),
    ),
    "clock-off": Broken(said(GPU, "time", to=CLOCK + 60), text="+59 s", remedy="set-ntp true"),
    "clock-unsynchronised": Broken(said(GPU, "synchronised", to=False), evidence="NTPSynchronized"),
    "file-edited": (
        Broken(
            state(files=lambda was: {**was, "/etc/vllm/glm-a.sh": ["0" * 64, "0o755", "r", "r"]}),
            evidence="/etc/vllm/glm-a.sh was edited", remedy=DEPLOY,
        ),
        Broken(
            state(files=lambda was: {k: v for k, v in was.items() if k != "/etc/vllm/glm-a.sh"}),
            evidence="/etc/vllm/glm-a.sh is gone", remedy=DEPLOY,
        ),
    ),
    "not-deployed": (
        Broken(
            state(packages=lambda was: {k: v for k, v in was.items() if k != "gcc"}),
            evidence="package gcc is missing", remedy=DEPLOY,
        ),
        Broken(
            state(instances=lambda was: {**was, "glm-a": {**was["glm-a"], "running": "other"}}),
            evidence="instance glm-a runs with older settings", remedy=DEPLOY,
        ),
        Broken(
            state(units={"vllm@old.service": unit()}),
            evidence="instance old is no longer in the plan", remedy=DEPLOY,
        ),
    ),
    "files-not-read": Broken(
        state(GW, loaded={"nginx.service": ":older"}), GW, remedy="deploy.py --limit gw-1"
    ),
    "release-differs": Broken(
        state(
            instances=lambda was: {**was, "glm-a": {**was["glm-a"], "release": "0.31.0-old"}},
            releases={"0.31.0-old": {"version": "0.31.0"}},
        ),
        "gpu-1/glm-a", text="group_vars want", remedy="upgrade.py",
    ),
    "mixed-versions": Broken(
        state(
            instances=lambda was: {**was, "glm-a": {**was["glm-a"], "release": "0.31.0-old"}},
            releases={"0.31.0-old": {"version": "0.31.0"}},
        ),
        text="pool glm runs 2 releases", evidence="gpu-1/glm-a",
    ),
    "change-cut-off": Broken(
        state(rollout={"glm-a": {"pool": "glm", "goods": [], "refused": [],
                                 "step": {"to": {"release": "0.33.0-x", "checksum": "2"}}}}),
        "gpu-1/glm-a", text="0.33.0-x", remedy="upgrade.py",
    ),
    "plan-refused": Broken(
        lambda c: _no_address(c), GW, text="IP address",
    ),
    "lock-left": Broken(
        state(GW, lock={"run": "1130-1", "who": "ann", "what": "upgrade.py", "where": "x",
                        "silent": 500}),
        GW, remedy="--data unlock=1130-1",
    ),
    "served-name-differs": (
        Broken(
            instance("names", to=["glm-old", "glm-4"]), "gpu-1/glm-a",
            evidence="/v1/models lists glm-old, glm-4", remedy=DEPLOY,
        ),
        Broken(
            instance("script_names", to=["old"]), "gpu-1/glm-a",
            evidence="/etc/vllm/glm-a.sh says old",
        ),
        Broken(
            said(GW, "gateway", "names", to=["glm", "glm-4"]), GW, evidence="lacks qwen",
            remedy="deploy.py --limit gw-1",
        ),
        Broken(
            said(GW, "gateway", "names", to=["glm", "glm-4", "qwen", "llama"]), GW,
            evidence="lists llama",
        ),
    ),
    "answers-fail": (
        Broken(
            instance("answer", to={"ok": False, "why": "no answer within 20 s"}), "gpu-1/glm-a",
            evidence="no answer within 20 s", remedy="| fleet explain -",
        ),
        Broken(
            together(instance("names", to=None), instance("why", to="/v1/models: refused")),
            "gpu-1/glm-a", evidence="/v1/models: refused",
        ),
    ),
    "requests-waiting": Broken(
        instance("answer", to={"ok": False, "why": "no answer within 12 s", "waiting": 40}),
        "gpu-1/glm-a",
        text="it is busy",
        remedy="num_requests",
    ),
    "talk-fails": Broken(
        instance("turns", to={"ok": False, "why": "answered 400: Conversation roles must alternate "
                                                  "user/assistant"}),
        "gpu-1/glm-a", evidence="400",
    ),
    "talk-does-not-end": Broken(
        instance("turns", to={"ok": True, "why": "", "answers": 3, "ended": 0}), "gpu-1/glm-a"
    ),
    "no-chat-template": Broken(
        instance("template", to=False), evidence="no chat_template", remedy="weights.py verify glm"
    ),
    "weights-changed": Broken(
        lambda c: _stamp(c, "changed", [["a.safetensors", "has 3 bytes, not 4"]]),
        evidence="a.safetensors has 3 bytes, not 4", remedy="weights.py verify glm",
    ),
    "weights-differ": Broken(
        lambda c: _stamp(c, "wrong", ["a.safetensors"]),
        evidence="a.safetensors has another sha256", remedy="weights.py verify glm",
    ),
    "debugging-left": (
        Broken(
            variable("NCCL_DEBUG", "INFO", "/etc/systemd/system/vllm@.service.d/x.conf"),
            "gpu-1/glm-a", evidence="vllm@.service.d/x.conf", remedy="sed -i /NCCL_DEBUG=/d",
        ),
        Broken(
            variable("CUDA_LAUNCH_BLOCKING", "1"), "gpu-1/glm-a", evidence="the running process",
            remedy="systemctl restart vllm@glm-a",
        ),
    ),
    "nccl-no-interface": (
        Broken(
            variable("NCCL_SOCKET_IFNAME", "=bond", "/etc/vllm/glm-a.env"), "gpu-1/glm-a",
            text="bond", remedy=DEPLOY,
        ),
        Broken(variable("NCCL_IB_HCA", "mlx5_9"), "gpu-1/glm-a", text="mlx5_9"),
    ),
    "gloo-interface": Broken(variable("GLOO_SOCKET_IFNAME", "bond"), "gpu-1/glm-a", text="bond"),
    "keep-alive-short": Broken(
        variable("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5", "/etc/x.conf"),
        "gpu-1/glm-a",
        text="after 5 s, gateways after 60 s",
        evidence="/etc/x.conf",
    ),
    "killed-9": Broken(
        log(2, "vllm@glm-a.service: Main process exited, code=killed, status=9/KILL"),
        "gpu-1/glm-a", text="restarted 2 times", evidence="status=9/KILL",
    ),
    "kv-cache-too-small": Broken(
        log(1, "ValueError: (1.10 GiB KV cache is needed, which is larger", "Engine core "
               "initialization failed. See root cause above."),
        "gpu-1/glm-a", evidence="GiB KV cache is needed",
    ),
    "restarted": Broken(
        log(1, "RuntimeError: a thing nobody has seen", "Main process exited, code=exited"),
        "gpu-1/glm-a", evidence="a thing nobody has seen", remedy="fleet explain -",
    ),
    "port-blocked": (
        Broken(
            said(GW, "gateway", "reach", "gpu-1/glm-a", to="no answer in time"), "gpu-1/glm-a",
            text="gw-1 cannot reach it: no answer in time",
            remedy="nft list ruleset | grep -n 8001",
        ),
        Broken(
            together(
                said(GW, "gateway", "reach", "gpu-1/glm-a", to="no answer in time"),
                said(GPU, "blocking", to=[{"port": 8001, "rule": "tcp dport 8001 drop",
                                           "at": "ip filter INPUT", "handle": 12}]),
            ),
            "gpu-1/glm-a", evidence="ip filter INPUT: tcp dport 8001 drop",
            remedy="ssh gpu-1 'nft delete rule ip filter INPUT handle 12'",
        ),
        Broken(
            said(GW, "prometheus", "down", to=target(9100, "context deadline exceeded")),
            text="port 9100 listens there, and Prometheus on gw-1 cannot reach it",
        ),
    ),
    "target-down": Broken(
        said(GW, "prometheus", "down", to=target(9100, "server returned HTTP status 500")),
        evidence="HTTP status 500", remedy="ssh gw-1 'curl",
    ),
    "gateway-answers-fail": (
        Broken(
            said(GW, "gateway", "answers", "glm", to={"ok": False, "why": "503 no instance"}), GW,
            evidence="503 no instance", remedy="9145/status",
        ),
        Broken(said(GW, "gateway", "why", to="connection refused"), GW, evidence="refused"),
    ),
    "gateway-not-asked": Broken(
        said(GW, "gateway", "why", to="asks for a key"), GW, remedy="--key-file"
    ),
    "gateway-sees-other": Broken(
        lambda c: _at_gateway(c, {"ready": False, "state": "not ready"}), "gpu-1/glm-a"
    ),
    "instance-drained": Broken(
        lambda c: _at_gateway(c, {"draining": True, "state": "draining"}), "gpu-1/glm-a",
        remedy="undrain?instance=gpu-1/glm-a",
    ),
    "key-expired": Broken(
        lambda c: _keys(c, "2026-11-29"), GW, evidence="secrets/keys.yml: expires 2026-11-29"
    ),
    "key-expires": Broken(lambda c: _keys(c, "2026-12-05"), GW, text="in 6 days"),
    "certificate-expires": Broken(certificate(1), GW, text="ends in 1 days"),
    "certificate-expires-soon": Broken(certificate(9), GW, evidence="CN=llm"),
    "hold-too-short": Broken(
        state(instances=lambda was: {**was, "qwen-a": {**was["qwen-a"], "start_seconds": 2000.0}}),
        GW, text="took 2000 s",
    ),
    "alert-firing": Broken(alert("Mine", "elsewhere", "warning"), text="alert Mine: it burns"),
    "card-throttled": Broken(alert("CardThrottled", "card-throttled", "warning"), text="it burns"),
}  # fmt: skip


def _no_address(case: Case) -> Case:
    hosts = [
        h if h.name != GPU else h.model_copy(update={"address": "no-ip"}) for h in case.fleet.hosts
    ]
    return replace(case, fleet=case.fleet.model_copy(update={"hosts": tuple(hosts)}))


def _stamp(case: Case, what: str, to: Any) -> Case:
    (path,) = [p for p in case.answers[GPU]["stamps"] if "/glm/" in p]
    case.answers[GPU]["stamps"][path][what] = to
    return case


def _at_gateway(case: Case, to: dict[str, Any]) -> Case:
    for pool in case.answers[GW]["gateway"]["status"]["pools"]:
        for one in pool["instances"]:
            if (one["host"], one["name"]) == (GPU, "glm-a"):
                one.update(to)
    return case


def _keys(case: Case, expires: str) -> Case:
    (name,) = case.inputs.keys
    (key,) = case.inputs.keys[name]
    keys = {name: (key.model_copy(update={"expires": expires}),)}
    return replace(case, inputs=replace(case.inputs, keys=keys))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Made once: planning takes longest."""
    return sound(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def made(built: Case, tmp_path: Path) -> Callable[..., Case]:
    """Makes the sound case, for a test to break; with other keys anew."""

    def make(keys: str | None = None) -> Case:
        if keys is not None:
            return sound(tmp_path, keys=keys)
        return replace(built, answers=deepcopy(dict(built.answers)))

    return make


EACH = [
    pytest.param(name, one, id=f"{name}-{number}" if number else name)
    for name, cases in CASES.items()
    for number, one in enumerate(cases if isinstance(cases, tuple) else (cases,))
]


def test_nothing_is_found_where_all_is_sound(made: Callable[..., Case]) -> None:
    case = made()
    assert diagnose(case) == []
    data = report(case, [])
    assert data["ok"]
    assert [check["area"] for check in data["checklist"]] == list(AREAS)
    seen = {check["area"]: check["seen"] for check in data["checklist"]}
    assert seen["instances"] == "3 of 3 answered"
    assert seen["gateway"] == "2 of 2 models answered"
    assert seen["keys"] == "1 key"


@pytest.mark.parametrize(("name", "broken"), EACH)
def test_what_is_broken_is_named_with_its_remedy(
    made: Callable[..., Case], name: str, broken: Broken
) -> None:
    case = broken.change(made())
    found = [f for f in diagnose(case) if f.id == name]
    shown = [(f.id, f.where, f.text, f.evidence, f.remedy) for f in diagnose(case)]
    assert [f for f in found if f.where == broken.where], shown
    (one,) = [f for f in found if f.where == broken.where][:1]
    assert broken.text in one.text
    assert broken.evidence in one.evidence
    assert broken.remedy in (one.remedy[0] if one.remedy else "")
    assert one.remedy or one.note or one.entry.remedy


def test_every_entry_has_a_case() -> None:
    assert {entry.id for entry in ENTRIES} <= set(CASES)
    assert set(SHARED) <= set(CASES)


# --- what is found, and what is not


def ids(case: Case) -> list[str]:
    return [f.id for f in diagnose(case)]


def test_the_worst_come_first_and_an_unreached_host_last(made: Callable[..., Case]) -> None:
    case = together(
        said("gpu-2", "synchronised", to=False),
        said("gpu-2", "strangers", to=stranger("engine")),
        state("gpu-2", units={"prometheus-node-exporter.service": unit("inactive")}),
    )(made())
    case = replace(
        case,
        states={k: v for k, v in case.states.items() if k != GPU},
        answers={k: v for k, v in case.answers.items() if k != GPU},
        failures={GPU: "unreachable: no route"},
    )
    assert ids(case) == ["orphan-engine", "exporter-stopped", "clock-unsynchronised", "host-down"]
    assert not report(case, diagnose(case))["ok"]


def test_what_only_informs_is_no_failure(made: Callable[..., Case]) -> None:
    case = said(GPU, "synchronised", to=False)(made())
    data = report(case, diagnose(case))
    assert data["ok"]
    assert data["findings"][0]["id"] == "clock-unsynchronised"


def test_a_port_that_is_taken_does_not_hide_the_rest(made: Callable[..., Case]) -> None:
    """deploy.py refuses such a fleet; the doctor still compares plan and host."""
    case = together(
        state(listening={"8001": {"pid": 55, "user": "bob", "command": "nc", "unit": None}}),
        state("gpu-2", packages=lambda was: {k: v for k, v in was.items() if k != "gcc"}),
    )(made())
    assert {"port-in-use", "not-deployed"} <= set(ids(case))


def test_a_process_that_the_host_does_not_show_is_not_to_be_killed_by_number(
    made: Callable[..., Case],
) -> None:
    """`kill 0` would end the operator's own session; a pid of a container is another's here."""
    nobody = {"pid": 0, "user": "?", "command": "?", "unit": None}
    cards = {"holders": [{**nobody, "pid": 4711, "uuid": "GPU-0000", "memory_mib": 9}]}
    case = state(listening={"8001": nobody}, cards=cards)(made())
    found = [one for one in diagnose(case) if one.id in ("port-in-use", "card-memory-taken")]
    assert len({one.id for one in found}) == 2
    for one in found:
        assert "a process that this host does not show" in one.text
        assert "stop it, or" in one.note
        assert not one.remedy


def test_a_held_host_is_not_told_of_its_stopped_instances(made: Callable[..., Case]) -> None:
    case = state(held={"who": "ann"}, units={A: unit("inactive")})(made())
    assert "instance-stopped" not in ids(case)


def test_clocks_that_are_all_off_are_this_machines_own(made: Callable[..., Case]) -> None:
    case = made()
    for name in case.answers:
        case.answers[name]["time"] = CLOCK + 3600
    assert ids(case) == []


def test_a_slow_talk_and_a_slow_answer_lead_to_no_restart(made: Callable[..., Case]) -> None:
    case = instance("turns", to={"ok": False, "why": "/v1/x: no answer within 4 s"})(made())
    assert ids(case) == []
    busy = {"ok": False, "why": "/v1/x: no answer within 12 s", "waiting": 40}
    (one,) = diagnose(instance("answer", to=busy)(made()))
    assert one.id == "requests-waiting"
    assert "restart" not in " ".join(one.remedy)


def test_a_small_share_of_a_large_disk_is_room_enough(made: Callable[..., Case]) -> None:
    large = {"mount": "/", "free_mib": 400 * 1024, "free": 0.02, "inodes_free": 0.9}
    assert ids(said(GPU, "disks", to=[large])(made())) == []


def test_a_planned_alert_and_harmless_variables_are_not_told(made: Callable[..., Case]) -> None:
    case = together(
        alert("PlannedChange", "planned-change", "none"), variable("NCCL_DEBUG", "WARN")
    )(made())
    assert ids(case) == []


def test_a_key_for_some_models_does_not_make_the_others_missing(made: Callable[..., Case]) -> None:
    keys = KEYS + '- {name: part, key: "sk-app-2", models: [glm]}\n'
    case = said(GW, "gateway", "names", to=["glm", "glm-4"])(made(keys=keys))
    assert ids(case) == []


@pytest.mark.parametrize(
    ("key", "value", "missing"),
    [
        ("NCCL_SOCKET_IFNAME", "bond", []),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=bond", ["bond"]),
        ("NCCL_SOCKET_IFNAME", "=bond0", []),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", []),
        ("NCCL_SOCKET_IFNAME", "ib0,bond", ["ib0"]),
        ("GLOO_SOCKET_IFNAME", "bond0", []),
        ("GLOO_SOCKET_IFNAME", "bond", ["bond"]),
    ],
)
def test_interfaces_are_read_as_nccl_and_gloo_read_them(
    key: str, value: str, missing: list[str]
) -> None:
    assert missing_interfaces(key, value, ["bond0", "lo"]) == missing


def test_findings_are_plain_data(made: Callable[..., Case]) -> None:
    case = state(units={A: unit("inactive")})(made())
    (one,) = [f for f in report(case, diagnose(case))["findings"] if f["level"] == "critical"]
    assert one == {
        "id": "instance-stopped",
        "level": "critical",
        "area": "units",
        "host": GPU,
        "instance": "glm-a",
        "cause": "vllm@glm-a.service is not running",
        "evidence": "systemctl: inactive, enabled",
        "remedy": [
            "ssh gpu-1 'systemctl reset-failed vllm@glm-a.service; "
            "systemctl enable --now --no-block vllm@glm-a.service'"
        ],
        "note": Finding("instance-stopped", GPU, "").entry.remedy,
        "runbook": "docs/runbook.md#instance-stopped",
    }
