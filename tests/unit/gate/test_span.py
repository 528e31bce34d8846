"""What a rank of a span decides by itself; the ranks together are in tests/integration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from vllm_fleet.gate import span
from vllm_fleet.spec.model import RAY_PORTS, RAY_WORKER_PORTS

ENV = {
    "FLEET_SPAN": "big",
    "FLEET_RANK": "1",
    "FLEET_RANKS": "one=10.0.0.1,two=10.0.0.2",
    "FLEET_WATCH_PORT": "29500",
    "FLEET_SILENT_SECONDS": "10",
    "FLEET_JOIN_SECONDS": "120",
    "FLEET_SETTINGS": "abc",
    "FLEET_EXECUTOR": "ray",
    "FLEET_RAY_PORT": "29510",
    "FLEET_RELEASE": "/opt/vllm/releases/0.32.0-1a2b3c4d",
    "FLEET_RUN": "/run/vllm/big-r1",
    "FLEET_PORT": "8001",
    "FLEET_DRAIN_SECONDS": "600",
}


def test_ray_has_the_ports_that_the_firewall_knows_and_no_others() -> None:
    for rank in ("0", "1"):
        words = span.ray_command(span.Settings({**ENV, "FLEET_RANK": rank}), "0,1,2,3")
        ports = [int(n) for w in words for n in re.findall(r"port=(\d+)$", w)]
        given = [port for port in ports if port]
        assert len(set(given)) == len(given)
        assert min(given) >= 29510
        assert max(given) < 29510 + RAY_PORTS + RAY_WORKER_PORTS
        assert "--num-gpus=4" in words
    assert "--address=10.0.0.1:29510" in words
    assert "--node-ip-address=10.0.0.2" in words


def test_the_head_of_ray_has_no_dashboard() -> None:
    words = span.ray_command(span.Settings({**ENV, "FLEET_RANK": "0"}), "")
    assert words[:2] == ["/opt/vllm/releases/0.32.0-1a2b3c4d/bin/ray", "start"]
    assert {"--head", "--block", "--include-dashboard=false"} <= set(words)
    assert not any(word.startswith("--num-gpus") for word in words)  # Ray looks by itself


def test_rays_server_for_clients_has_a_port_of_ours_where_ray_starts_one(tmp_path: Path) -> None:
    """Ray refuses the option where it has no gRPC, and takes port 10001 where nobody says one."""
    found = []
    for release, package in (("with", "grpc"), ("without", "grpcio_tools")):
        (tmp_path / release / "lib/python3.11/site-packages" / package).mkdir(parents=True)
        for rank in ("0", "1"):
            env = {**ENV, "FLEET_RANK": rank, "FLEET_RELEASE": str(tmp_path / release)}
            words = span.ray_command(span.Settings(env), "")
            found.append([w for w in words if w.startswith("--ray-client-server-port")])
    assert found == [["--ray-client-server-port=29517"], [], [], []]


def test_what_is_a_hosts_own_is_not_carried_to_others(tmp_path: Path) -> None:
    env = {
        "HOME": "/var/lib/vllm/big-r0",
        "VLLM_CACHE_ROOT": "/var/lib/vllm/big-r0/cache/x",
        "NCCL_SOCKET_IFNAME": "=eno1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    folder = span.keep_at_home(str(tmp_path), env)
    named = json.loads((Path(folder) / "ray_non_carry_over_env_vars.json").read_text())
    assert {"VLLM_CACHE_ROOT", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"} <= set(named)
    assert "VLLM_LOGGING_LEVEL" not in named


def test_ranks_differ_by_what_one_of_them_lacks_too() -> None:
    assert span.difference({"release": "a"}, {"release": "a"}) == ""
    found = span.difference({"release": "a", "driver": "580"}, {"release": "b"})
    assert found == "driver none, not 580; release b, not a"


def test_the_interface_of_an_address_is_found() -> None:
    assert span.interface("127.0.0.1") == "lo"
    assert span.interface("192.0.2.77") == ""


def test_every_process_below_one_is_seen() -> None:
    code = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            for _ in range(200):
                found = span.descendants(os.getpid())
                if any(title == "sleep" for _, title in found.values()):
                    break
            else:
                raise AssertionError(found)
            assert process.pid in found
        finally:
            os.killpg(process.pid, 9)
