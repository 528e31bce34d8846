"""Spans in the plan: what each host gets, what the gateway knows, what must not start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.unit.fleets import fleet, state, states, unit
from vllm_fleet import instance as vllm
from vllm_fleet import spans
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.overview import overview
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import Inputs
from vllm_fleet.spec.model import Fleet

ALL = """\
vllm_version: "0.32.0"
models:
  glm: {repo: ZhipuAI/GLM-4-9B-0414, revision: v1}
instances:
  - name: big
    hosts: [gpu-2, gpu-1]  # rank 0 is the first of them, wherever it stands in the inventory
    model: glm
    cards: [0, 1]
    port: 8001
    span: {SPAN}
"""
NICS = {"eth0": {"addresses": ["10.0.0.1/24"], "speed_mbit": 25000, "mtu": 1500}}
OTHER = {"ib0": {"addresses": ["10.0.0.2/24"], "speed_mbit": 25000, "mtu": 9000}}


def made(root: Path, span: str = "", **changes: Any) -> tuple[Fleet, dict[str, HostPlan]]:
    found = fleet(root, all=ALL.replace("SPAN", span))
    return found, plan_fleet(found, states(found, **changes), Inputs())


def text(plan: HostPlan, path: str) -> str:
    return next(f.content for f in plan.files if f.path == path)


def test_each_host_gets_its_rank(tmp_path: Path) -> None:
    _, found = made(tmp_path)
    assert [i.unit for i in found["gpu-1"].instances] == ["vllm@big-r1.service"]
    assert [i.unit for i in found["gpu-2"].instances] == ["vllm@big-r0.service"]
    scripts = {
        rank: text(found[host], f"/etc/vllm/big-r{rank}.sh")
        for rank, host in ((0, "gpu-2"), (1, "gpu-1"))
    }
    for rank, script in scripts.items():
        for words in (
            "exec /usr/bin/python3 -s -E /usr/local/lib/vllm-fleet/span.py",
            "--tensor-parallel-size 2",
            "--pipeline-parallel-size 2",
            "--distributed-executor-backend mp",
            "--nnodes 2",
            f"--node-rank {rank}",
            "--master-addr 10.0.0.2",
            "--master-port 29501",
        ):
            assert words in script.replace(vllm.paths.LIB, "/usr/local/lib/vllm-fleet"), words
        assert ("--headless" in script) == (rank == 1)
        assert "data-parallel" not in script
    env = text(found["gpu-1"], "/etc/vllm/big-r1.env")
    assert 'FLEET_RANKS="gpu-2=10.0.0.2,gpu-1=10.0.0.1"' in env
    assert 'VLLM_HOST_IP="10.0.0.1"' in env
    assert 'FLEET_SPAN_PORTS=""' in env
    first = text(found["gpu-2"], "/etc/vllm/big-r0.env")
    assert 'FLEET_SPAN_PORTS="watch_port=29500,master_port=29501"' in first
    settings = [re.search(r'FLEET_SETTINGS="(\w+)"', one) for one in (env, first)]
    assert settings[0]
    assert settings[1]
    assert settings[0][1] == settings[1][1]  # else the ranks would not meet


def test_the_tested_fabric_comes_before_the_instances_own_environment(tmp_path: Path) -> None:
    _, found = made(tmp_path)
    drop_in = text(found["gpu-1"], "/etc/systemd/system/vllm@big-r1.service.d/10-instance.conf")
    listed = [line for line in drop_in.splitlines() if line.startswith("EnvironmentFile=")]
    assert listed == [
        "EnvironmentFile=",
        "EnvironmentFile=-/etc/vllm/fabric.env",
        "EnvironmentFile=/etc/vllm/%i.env",
    ]
    assert "TimeoutStartSec=infinity" in drop_in


def test_the_split_of_the_model_is_not_that_of_the_span(tmp_path: Path) -> None:
    text_of = ALL.replace("SPAN", "").replace(
        "revision: v1}", "revision: v1, vllm_args: {tensor-parallel-size: 4, seed: 7}}"
    )
    found = fleet(tmp_path, all=text_of)
    script = text(plan_fleet(found, states(found), Inputs())["gpu-1"], "/etc/vllm/big-r1.sh")
    assert "--tensor-parallel-size 2" in script
    assert "--tensor-parallel-size 4" not in script
    assert "--seed 7" in script


def test_what_a_server_alone_takes_is_not_given_to_headless_ranks(tmp_path: Path) -> None:
    text_of = ALL.replace("SPAN", "").replace(
        "port: 8001", "port: 8001\n    vllm_args: {api-server-count: 2, seed: 7}"
    )
    found = fleet(tmp_path, all=text_of)
    plans = plan_fleet(found, states(found), Inputs())
    assert "--api-server-count 2" in text(plans["gpu-2"], "/etc/vllm/big-r0.sh")
    other = text(plans["gpu-1"], "/etc/vllm/big-r1.sh")
    assert "--api-server-count" not in other
    assert "--seed 7" in other


def test_another_tested_fabric_is_a_change_of_the_ranks_on_its_host(tmp_path: Path) -> None:
    _, before = made(tmp_path / "a")
    with_file = {"texts": {"/etc/vllm/fabric.env": 'NCCL_SOCKET_IFNAME="=eth1"\n'}}
    _, after = made(tmp_path / "b", gpu_1=with_file)
    assert before["gpu-1"].checksums != after["gpu-1"].checksums
    assert before["gpu-2"].checksums == after["gpu-2"].checksums


def test_data_parallel_ranks_are_told_their_port(tmp_path: Path) -> None:
    _, found = made(tmp_path, "data_parallel: 2")
    script = text(found["gpu-1"], "/etc/vllm/big-r1.sh")
    assert "--data-parallel-size 2" in script
    assert "--data-parallel-rpc-port 29502" in script
    assert "--pipeline-parallel-size 1" in script


def test_the_gateway_and_the_probe_know_rank_0_alone(tmp_path: Path) -> None:
    _, found = made(tmp_path)
    pools = next(f.content for f in found["gw-1"].files if "big-r0" in f.content)
    assert "10.0.0.2" in pools
    for host in ("gw-1", "gpu-1"):
        assert not [
            f.path
            for f in found[host].files
            if "big-r1" in f.content and ("gateway" in f.path or "probe.json" in f.path)
        ]


def test_settings_that_were_changed_change_every_rank(tmp_path: Path) -> None:
    _, before = made(tmp_path / "a")
    _, after = made(tmp_path / "b", "silent_seconds: 20")
    for host in ("gpu-1", "gpu-2"):
        assert before[host].checksums != after[host].checksums


def test_ports_between_ranks_are_open_to_the_hosts_of_the_span_alone(tmp_path: Path) -> None:
    ssh = {"40022": {"pid": 1, "user": "root", "command": "sshd", "unit": "ssh.service"}}
    _, found = made(tmp_path, gpu_1={"listening": ssh})
    table = text(found["gpu-1"], "/etc/vllm/firewall.nft")
    lines = [line.strip() for line in table.splitlines()]
    closed = lines.index(
        "tcp dport { 29500, 29501, 29502, 32768-60999 } tcp flags & (fin | syn | rst | ack) == "
        "syn jump nodes"
    )
    assert lines.index("tcp dport { 40022 } accept") < closed
    chain = lines[lines.index("chain nodes {") :][:4]
    assert chain[1:] == [
        'iifname "lo" accept',
        "ip saddr { 10.0.0.1, 10.0.0.2 } accept",
        "counter reject with tcp reset",
    ]


def test_who_listens_at_a_port_that_is_closed_is_told(tmp_path: Path) -> None:
    other = {"50051": {"pid": 1, "user": "app", "command": "grpcd", "unit": "app.service"}}
    _, found = made(tmp_path, gpu_1={"listening": other})
    assert any("50051 (grpcd)" in notice for notice in found["gpu-1"].notices)
    assert not any("50051" in notice for notice in found["gpu-2"].notices)


def test_a_rank_waits_for_a_run_with_all_its_hosts(tmp_path: Path) -> None:
    found = fleet(tmp_path, all=ALL.replace("SPAN", ""))
    seen = states(found)
    del seen["gpu-2"]
    plan = plan_fleet(found, seen, Inputs())["gpu-1"]
    assert plan.to_start() == ()
    assert any("gpu-2 of span big takes no part in this run" in one for one in plan.notices)


def test_ranks_with_different_releases_are_left_alone(tmp_path: Path) -> None:
    old = "0.31.0-open"
    ran = {
        "releases": {old: {"version": "0.31.0"}},
        "instances": {"big-r0": {"release": old, "running": "x", "ready": True}},
        "units": {"vllm@big-r0.service": unit()},
    }
    _, found = made(tmp_path, gpu_2=ran)
    for host in ("gpu-1", "gpu-2"):
        assert found[host].to_start() == ()
        assert any("have different releases" in one for one in found[host].notices)


def test_hosts_with_different_drivers_start_no_span(tmp_path: Path) -> None:
    cards = state().cards
    other = {**cards, "csv": cards["csv"].replace("580.95.05", "590.44.01")}
    _, found = made(tmp_path, gpu_2={"cards": other})
    for host in ("gpu-1", "gpu-2"):
        assert found[host].to_start() == ()
        assert any("driver differs between the nodes" in one for one in found[host].notices)


def test_one_that_waits_with_old_settings_is_replaced_not_watched(tmp_path: Path) -> None:
    waits = {
        "instances": {"big-r1": {"release": "0.32.0-open", "running": "other"}},
        "releases": {"0.32.0-open": {"version": "0.32.0"}},
        "units": {"vllm@big-r1.service": unit("activating")},
    }
    _, found = made(tmp_path, gpu_1=waits)
    assert found["gpu-1"].to_start() == ()
    assert [one.name for one in found["gpu-1"].to_restart()] == ["big-r1"]
    assert found["gpu-2"].to_start() == ()  # it would wait for the one with old settings


def test_links_of_the_hosts_are_shown_and_compared(tmp_path: Path) -> None:
    found = fleet(tmp_path, all=ALL.replace("SPAN", ""))
    seen = {
        **states(found),
        "gpu-1": state(hostname="gpu-1", nics=NICS),
        "gpu-2": state(hostname="gpu-2", nics=OTHER),
    }
    shown = overview(found, seen, {}, Inputs())
    (span,) = shown["spans"]
    assert (span["tensor_parallel"], span["pipeline_parallel"], span["answers"]) == (
        2,
        2,
        "gpu-2/big-r0",
    )
    assert [(one["host"], one["interface"], one["mtu"]) for one in span["hosts"]] == [
        ("gpu-2", "ib0", 9000),
        ("gpu-1", "eth0", 1500),
    ]
    assert "gpu-2: span big: its hosts differ in mtu: gpu-2 9000, gpu-1 1500" in shown["warnings"]


def test_an_address_that_no_interface_has_is_told(tmp_path: Path) -> None:
    found = fleet(tmp_path, all=ALL.replace("SPAN", ""))
    seen = {**states(found), "gpu-2": state(hostname="gpu-2", nics=NICS)}
    assert spans.link_notices(found, seen, "gpu-2") == [
        "span big: gpu-2 has no interface with 10.0.0.2: name the right one in span.addresses"
    ]
