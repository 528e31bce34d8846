"""What a deploy refuses on real hosts: each names the host, the reason and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import HostFactory
from tests.integration.operators import Operator
from tests.testbed import hub
from tests.testbed.bed import Bed
from tests.testbed.hosts import Host
from vllm_fleet import release
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.load import load_fleet

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

NVIDIA_SMI = """\
#!/usr/bin/python3
import sys
card = {"index": "0", "uuid": "GPU-aaaa", "name": "NVIDIA L40S", "memory.total": "46068 MiB",
        "memory.used": "1100 MiB", "pci.bus_id": "00000000:01:00.0", "compute_cap": "8.9",
        "driver_version": "580.95.05", "mig.mode.current": "[N/A]"}
for word in sys.argv[1:]:
    if word.startswith("--query-gpu="):
        fields = word.split("=", 1)[1].split(",")
        print(", ".join(fields))
        print(", ".join(card.get(field, "[N/A]") for field in fields))
    elif word.startswith("--query-compute-apps="):
        print("gpu_uuid, pid, process_name, used_gpu_memory [MiB]")
        print(f"GPU-aaaa, {open('/run/holder').read().strip()}, sleep, 1024 MiB")
"""


@pytest.fixture
def small(
    bed: Bed, host_factory: HostFactory, tmp_path: Path
) -> Callable[..., tuple[Host, Operator]]:
    """A fresh host with nothing on it, and an operator who wants one instance there."""

    def make(
        settings: dict[str, Any] | None = None, user: str = "root", **connection: Any
    ) -> tuple[Host, Operator]:
        host = host_factory("small", user=user)
        operator = Operator(tmp_path / "operator", bed.cache)
        data = json.loads((bed.root / "state.json").read_text())["inventory"]["small"]
        data |= connection
        (operator.root / "inventory" / "small.py").write_text(
            f"gpu = [('small', {data!r})]\ngateway = gpu[:]\n"
        )
        values = yaml.safe_load((operator.root / "group_vars" / "demo.yml").read_text())
        values["instances"] = [
            {"name": "glm", "hosts": ["small"], "model": "glm-4-tiny", "port": 8001}
        ]
        del values["models"]["qwen3-tiny"]
        values |= settings or {}
        (operator.root / "group_vars" / "small.yml").write_text(yaml.safe_dump(values))
        return host, operator

    return make


def refused(operator: Operator, *words: str) -> str:
    """Deploy; nothing but a refusal with these words may come of it."""
    done = operator.deploy(inventory="small")
    assert done.returncode == 1, done.stdout
    for word in words:
        assert word in done.stdout, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    return done.stdout


def write(host: Host, path: str, text: str, mode: str = "644") -> None:
    """Write a file on a running host."""
    host.sh(f"cat >{path}; chmod {mode} {path}", stdin=text)


def untouched(host: Host) -> None:
    """Nothing of ours is on the host."""
    left = host.sh("ls -d /opt/vllm /etc/vllm /var/lib/vllm /etc/nginx 2>/dev/null", check=False)
    assert left.stdout == ""


def test_a_system_that_is_not_supported(small: Callable[..., tuple[Host, Operator]]) -> None:
    host, operator = small()
    host.sh("rm /etc/os-release")
    write(host, "/etc/os-release", 'ID=rocky\nVERSION_ID=9.4\nPRETTY_NAME="Rocky 9.4"\n')
    refused(operator, "small: Rocky 9.4 is not supported", "Debian 12", "nothing was changed")
    untouched(host)


def test_a_user_without_sudo(small: Callable[..., tuple[Host, Operator]]) -> None:
    host, operator = small(user="ops", _sudo=False)
    refused(operator, "small: commands run as ops, not root", "_sudo", "nothing was changed")
    untouched(host)


def test_a_wrong_sudo_password(small: Callable[..., tuple[Host, Operator]]) -> None:
    host, operator = small(user="ops", _sudo_password="not-it-7391")
    said = refused(operator, "small: could not be looked at", "_sudo_password", "inventory")
    assert "not-it-7391" not in said
    untouched(host)


def test_a_port_that_a_stranger_holds(small: Callable[..., tuple[Host, Operator]]) -> None:
    host, operator = small()
    host.sh("setsid -f python3 -m http.server 8001 >/dev/null 2>&1 </dev/null; sleep 1")
    refused(
        operator, "small: port 8001 of instance glm is taken by pid", "of root", "http.server 8001"
    )
    untouched(host)


def test_a_card_that_a_stranger_holds_or_that_is_missing(
    small: Callable[..., tuple[Host, Operator]],
) -> None:
    """nvidia-smi is a stand-in here: no host of the bed has a card."""
    instances = [
        {"name": "glm", "hosts": ["small"], "model": "glm-4-tiny", "port": 8001, "cards": [0]},
        {"name": "two", "hosts": ["small"], "model": "glm-4-tiny", "port": 8002, "cards": [1]},
    ]
    host, operator = small({"device": "cuda", "instances": instances})
    write(host, "/usr/bin/nvidia-smi", NVIDIA_SMI, "755")
    host.sh(
        "setsid -f sh -c 'echo $$ >/run/holder; exec sleep 600' >/dev/null 2>&1 </dev/null; "
        "until [ -s /run/holder ]; do sleep 0.1; done"
    )
    refused(
        operator,
        "small: card 0 of instance glm is held by pid",
        "sleep 600",
        "instance two wants card 1; nvidia-smi lists 0",
    )
    untouched(host)


def test_no_card_at_all(small: Callable[..., tuple[Host, Operator]]) -> None:
    host, operator = small(
        {
            "device": "cuda",
            "instances": [
                {
                    "name": "glm",
                    "hosts": ["small"],
                    "model": "glm-4-tiny",
                    "port": 1025,
                    "cards": [0],
                }
            ],
        }
    )
    refused(operator, "small: no NVIDIA driver or card", "device")
    untouched(host)


def test_a_disk_without_room_for_the_release(
    small: Callable[..., tuple[Host, Operator]],
) -> None:
    host, operator = small()
    host.sh("mkdir -p /opt/vllm && mount -t tmpfs -o size=300m tmpfs /opt/vllm")
    refused(operator, "small: /opt/vllm has 300.0 MiB free", "are missing", "nothing was changed")
    assert host.sh("ls /opt/vllm /etc/vllm 2>/dev/null", check=False).stdout.strip() == "/opt/vllm:"


def test_a_host_that_cannot_be_reached_does_not_stop_the_others(
    small: Callable[..., tuple[Host, Operator]],
) -> None:
    host, operator = small()
    text = (operator.root / "inventory" / "small.py").read_text()
    (operator.root / "inventory" / "small.py").write_text(
        text + "gpu = [*gpu, ('gone', {**gpu[0][1], 'ssh_hostname': '10.255.255.1', "
        "'ssh_connect_timeout': 3})]\n"
    )
    done = operator.deploy("--dry", inventory="small")
    assert "gone" in done.stdout
    assert "unreachable: left out of this run" in done.stdout
    assert "[small] Ready: deploy.py" in done.stdout
    untouched(host)


@pytest.mark.parametrize(
    ("change", "fault", "words"),
    [
        ({"repo": "ZhipuAI/no-such-model"}, None, ("glm-4-tiny", "ZhipuAI/no-such-model", "repo")),
        ({"revision": "v9"}, None, ("glm-4-tiny", "v9", "revision")),
        ({}, hub.Fault("dead"), ("glm-4-tiny", "hub", "10.")),
    ],
    ids=["unknown model", "unknown revision", "hub down"],
)
def test_weights_that_cannot_be_had(
    small: Callable[..., tuple[Host, Operator]],
    bed: Bed,
    change: dict[str, Any],
    fault: hub.Fault | None,
    words: tuple[str, ...],
) -> None:
    host, operator = small()
    path = operator.root / "group_vars" / "small.yml"
    values = yaml.safe_load(path.read_text())
    values["models"]["glm-4-tiny"] |= change
    path.write_text(yaml.safe_dump(values))
    # Only the weights matter here: the release is one that the host has.
    found = load_fleet(str(operator.root / "inventory" / "small.py"))
    spec = found.host("small")
    order = release.order(spec.settings, "0.32.0", read_inputs(found).lock(spec, "0.32.0"))
    host.sh(f"mkdir -p /opt/vllm/releases/{order['id']}")
    write(host, f"/opt/vllm/releases/{order['id']}/release.json", "{}")
    if fault:
        hub.switch(bed.hub, fault)
    try:
        refused(operator, *words)
    finally:
        hub.switch(bed.hub)
    assert host.sh("systemctl is-active vllm@glm", check=False).stdout.strip() == "inactive"
    assert host.sh("ls /opt/vllm/models/glm-4-tiny", check=False).stdout.strip() == ""
