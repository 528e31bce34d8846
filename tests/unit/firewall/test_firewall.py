"""The table that closes the instances' ports: who is let in, and that nft takes it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, fleet, state, states
from vllm_fleet import firewall
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import Inputs
from vllm_fleet.spec.model import HostSpec

GATEWAY_NICS = {
    "eno1": {"addresses": ["10.0.0.9/24"]},
    "ib0": {"addresses": ["10.9.0.9/24", "fd00::9/64"]},
    "docker0": {"addresses": ["172.17.0.1/16"]},
}


def spec_of(root: Path, name: str = "gpu-1", **group_vars: str) -> HostSpec:
    return fleet(root, **group_vars).host(name)


def table(spec: HostSpec, peers: dict[str, list[str]]) -> str:
    return firewall.files(spec, peers)[0].content


def rules(text: str) -> list[str]:
    """The lines that nft acts on."""
    return [s for line in text.splitlines() if (s := line.strip()) and not s.startswith("#")]


def test_gateways_and_monitors_reach_the_ports_and_nobody_else(tmp_path: Path) -> None:
    text = table(spec_of(tmp_path), {"gw-1": ["10.0.0.9", "fd00::9"], "mon": ["10.0.0.8"]})
    assert rules(text) == [
        "table inet vllm_fleet",
        "delete table inet vllm_fleet",
        "table inet vllm_fleet {",
        "chain input {",
        "type filter hook input priority filter; policy accept;",
        "tcp dport { 8001, 8002 } tcp flags & (fin | syn | rst | ack) == syn jump instances",
        "}",
        "chain instances {",
        'iifname "lo" accept',
        "ip saddr { 10.0.0.8/31 } accept",
        "ip6 saddr { fd00::9 } accept",
        "counter reject with tcp reset",
        "}",
        "}",
    ]


def test_weights_are_shared_among_gpu_hosts_alone(tmp_path: Path) -> None:
    found = fleet(tmp_path, gpu="fanout: {enabled: true, port: 9001}\n")
    plans = plan_fleet(found, states(found), Inputs())
    text = next(f for f in plans["gpu-1"].files if f.path == firewall.FILE).content
    assert "tcp dport 9001 tcp flags & (fin | syn | rst | ack) == syn jump sharing" in text
    chain = rules(text[text.index("chain sharing") :])
    assert chain[:4] == [
        "chain sharing {",
        'iifname "lo" accept',
        "ip saddr { 10.0.0.1, 10.0.0.2 } accept",
        "counter reject with tcp reset",
    ]
    off = plan_fleet(fleet(tmp_path, gpu="{}\n"), states(found), Inputs())["gpu-1"]
    assert "sharing" not in next(f for f in off.files if f.path == firewall.FILE).content


def test_ports_of_ranks_are_open_to_hosts_of_the_fabric_alone(tmp_path: Path) -> None:
    found = fleet(tmp_path, gpu="nccl: {port: 29400}\n")
    nics = {
        "ens1": {"addresses": ["10.20.0.2/24", "fd00::2/64"]},
        "docker0": GATEWAY_NICS["docker0"],
    }
    ports = {"transfers": {"ports": [40000, 50000]}}
    looked = states(found, gpu_1=ports, gpu_2={"nics": nics})
    text = next(
        f for f in plan_fleet(found, looked, Inputs())["gpu-1"].files if f.path == firewall.FILE
    ).content
    opens = "tcp flags & (fin | syn | rst | ack) == syn"
    assert f"tcp dport {{ 29400, 40000-50000 }} {opens} jump nodes" in text
    assert rules(text[text.index("chain nodes") :])[:5] == [
        "chain nodes {",
        'iifname "lo" accept',
        "ip saddr { 10.0.0.1, 10.0.0.2, 10.20.0.2 } accept",
        "ip6 saddr { fd00::2 } accept",
        "counter reject with tcp reset",
    ]
    # Who takes no part in a run is remembered.
    del looked["gpu-2"]
    looked["gpu-1"] = replace(looked["gpu-1"], texts={firewall.FILE: text})
    again = next(
        f for f in plan_fleet(found, looked, Inputs())["gpu-1"].files if f.path == firewall.FILE
    ).content
    assert again == text


def test_sshd_is_never_closed_out(tmp_path: Path) -> None:
    found = fleet(tmp_path, gpu="nccl: {}\n")
    looked = states(found, gpu_1={"listening": {"40022": {"pid": 1, "unit": "ssh.service"}}})
    text = next(
        f for f in plan_fleet(found, looked, Inputs())["gpu-1"].files if f.path == firewall.FILE
    ).content
    assert text.index("tcp dport { 40022 } accept") < text.index("32768-60999")


def test_a_host_of_no_fabric_leaves_the_ports_of_the_kernel_alone(tmp_path: Path) -> None:
    found = fleet(tmp_path, gpu="{}\n")
    looked = states(found)
    assert firewall.nodes(found, found.host("gpu-1"), looked, None) == firewall.Nodes()


def test_where_ranks_of_a_span_meet_is_closed_too(tmp_path: Path) -> None:
    found = fleet(tmp_path, gpu="nccl: {}\n")
    ranks = firewall.Ranks((6379, 29500, 40001), {"gpu-2": ["10.9.0.2"]})
    nodes = firewall.nodes(found, found.host("gpu-1"), states(found), None, ranks)
    assert nodes.ports == ("6379", "29400", "29500", "32768-60999")
    assert nodes.addresses["gpu-2"] == ["10.0.0.2", "10.9.0.2"]


def test_further_networks_and_none_of_a_family(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, gpu='firewall_allow: ["10.0.0.0/8", "192.0.2.7"]\n')
    text = table(spec, {"gw-1": ["10.0.0.9"]})
    assert "ip saddr { 10.0.0.0/8, 192.0.2.7 } accept" in text
    assert "ip6 saddr" not in text
    assert "saddr" not in table(spec_of(tmp_path, gpu="{}\n"), {})


@pytest.mark.parametrize(
    "how", [{"gpu": "firewall: false\n"}, {"all": ALL.replace("[gpu-1, gpu-2]", "[gpu-2]")}]
)
def test_no_table_where_it_is_off_or_nothing_listens(tmp_path: Path, how: dict[str, str]) -> None:
    name = "gpu-1"
    how = {k: v.replace("hosts: [gpu-1]", "hosts: [gpu-2]") for k, v in how.items()}
    assert firewall.files(spec_of(tmp_path, name, **how), {"gw-1": ["10.0.0.9"]}) == []


def test_a_name_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpu-1: .*'gw.lan' is none; set `address`"):
        firewall.files(spec_of(tmp_path), {"gw-1": ["gw.lan"]})


def test_a_gateway_may_come_from_any_of_its_own_addresses(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    looked = {"gw-1": state(nics=GATEWAY_NICS), "gpu-1": state()}
    wanted = {"gw-1": ["10.0.0.9", "10.9.0.9", "fd00::9"]}
    assert firewall.peers(found, looked, None) == wanted
    # one run without the gateway must not shut it out, nor change the file
    present = table(found.host("gpu-1"), wanted)
    assert firewall.peers(found, {"gpu-1": state()}, present) == wanted
    # what it had and has no more is gone once it is looked at again
    looked["gw-1"] = replace(looked["gw-1"], nics={})
    assert firewall.peers(found, looked, present) == {"gw-1": ["10.0.0.9"]}


@pytest.mark.parametrize(
    "present", [None, "", "# Peers: {", "# Peers: [1]", '# Peers: {"gw-1": ["$(reboot)"]}']
)
def test_a_spoilt_file_remembers_nothing(tmp_path: Path, present: str | None) -> None:
    assert firewall.peers(fleet(tmp_path), {}, present) == {"gw-1": ["10.0.0.9"]}


def test_the_plan_of_a_gpu_host_holds_the_table_and_its_units(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    plans = plan_fleet(found, states(found, gw_1={"nics": GATEWAY_NICS}), Inputs())
    for name in ("gpu-1", "gpu-2"):
        plan = plans[name]
        assert "nftables" in plan.packages
        text = next(f.content for f in plan.files if f.path == firewall.FILE)
        assert "10.9.0.9" in text
        assert [s.unit for s in plan.firewall_services] == [
            "vllm-fleet-firewall.service",
            "vllm-fleet-firewall-guard.timer",
        ]
        assert plan.firewall_services[0].restarts == ""  # a restart would open the ports
    assert not plans["gw-1"].firewall_services
    assert "tcp dport { 8001 }" in text  # gpu-2 has one instance


def test_the_table_goes_with_its_files(tmp_path: Path) -> None:
    first = fleet(tmp_path)
    put = {f.path: f.sha256 for f in plan_fleet(first, states(first), Inputs())["gpu-1"].files}
    found = fleet(tmp_path, gpu="firewall: false\n")
    plan = plan_fleet(found, states(found, gpu_1={"manifest": put}), Inputs())["gpu-1"]
    assert plan.removed_files == (
        "/etc/systemd/system/vllm-fleet-firewall-guard.service",
        "/etc/systemd/system/vllm-fleet-firewall-guard.timer",
        "/etc/systemd/system/vllm-fleet-firewall.service",
        "/etc/vllm/firewall.nft",
    )


# With nft itself


def _nft(namespace: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", "netns", "exec", namespace, *words], capture_output=True, text=True, check=False
    )


@pytest.fixture
def namespace() -> Any:
    """A network of its own, so that this machine's ruleset is left alone."""
    if os.geteuid() != 0 or not shutil.which("nft") or not shutil.which("ip"):
        pytest.skip("needs root, nft and ip")
    name = f"vfnft{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        pytest.skip("cannot make a network namespace")
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.parametrize(
    "peers",
    [
        {},
        {"gw": ["10.0.0.9"], "mon": ["10.0.0.9", "fd00::1"]},
        {"gw": [f"10.1.{n // 250}.{n % 250}" for n in range(1000)]},
    ],
    ids=["nobody", "both", "many"],
)
def test_nft_takes_it_twice_and_leaves_other_tables(
    tmp_path: Path, namespace: str, peers: dict[str, list[str]]
) -> None:
    spec = spec_of(tmp_path, gpu='firewall_allow: ["10.0.0.0/16", "2001:db8::/32"]\n')
    nodes = firewall.Nodes(("29400", "32768-60999"), {**peers, "me": ["10.0.0.1", "fd00::5"]})
    assert _nft(namespace, "nft", "add table inet filter").returncode == 0
    file = tmp_path / "firewall.nft"
    file.write_text(firewall.files(spec, peers, nodes=nodes)[0].content)
    for _ in range(2):
        done = _nft(namespace, "nft", "-f", str(file))
        assert done.returncode == 0, done.stderr
    listed = _nft(namespace, "nft", "list", "tables").stdout.split("\n")
    assert sorted(filter(None, listed)) == ["table inet filter", "table inet vllm_fleet"]
    shown = _nft(namespace, "nft", "list", "table", "inet", "vllm_fleet").stdout
    assert shown.count("jump instances") == 1
