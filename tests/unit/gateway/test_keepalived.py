"""The shared address of the gateways: what its files say, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet import paths
from vllm_fleet.gateway import keepalived
from vllm_fleet.spec.model import Gateway, HostSettings, HostSpec, Keepalived

NICS = {
    "lo0": {"addresses": []},
    "bond0": {"addresses": ["fd00::1/64", "10.0.0.1/24"]},
}


def gateway(name: str, host: str, **settings: Any) -> HostSpec:
    shared = Keepalived(**{"address": "10.0.0.100/24", **settings})
    return HostSpec(
        name=name,
        groups=("gateway",),
        address=host,
        settings=HostSettings(gateway=Gateway(keepalived=shared)),
    )


def two(**settings: Any) -> list[HostSpec]:
    return [gateway("gw-01", "10.0.0.1", **settings), gateway("gw-02", "10.0.0.2", **settings)]


def conf_of(spec: HostSpec, gateways: list[HostSpec], password: str | None = None) -> str:
    files = keepalived.files(spec, gateways, NICS, password)
    return next(f.content for f in files if f.path == keepalived.CONF)


def test_nothing_where_it_is_not_set() -> None:
    alone = HostSpec(name="gw", groups=("gateway",), address="10.0.0.1", settings=HostSettings())
    assert keepalived.files(alone, [alone], NICS) == []


def test_the_whole_configuration() -> None:
    first, second = two()
    lines = conf_of(first, [first, second], "s3cret").splitlines()
    assert [line for line in lines if not line.strip().startswith("#")] == [
        "global_defs {",
        "    router_id gw-01",
        "    enable_script_security",
        "    script_user root",
        "    vrrp_garp_master_refresh 60",
        "}",
        "",
        "vrrp_script fleet_gateway {",
        '    script "/usr/share/vllm-fleet/check-gateway"',
        "    interval 1",
        "    timeout 3",
        "    fall 2",
        "    rise 2",
        "    init_fail",
        "}",
        "",
        "vrrp_instance fleet {",
        "    state BACKUP",
        "    nopreempt",
        "    interface bond0",
        "    virtual_router_id 51",
        "    priority 200",
        "    advert_int 1",
        "    unicast_src_ip 10.0.0.1",
        "    unicast_peer {",
        "        10.0.0.2",
        "    }",
        "    authentication {",
        "        auth_type PASS",
        "        auth_pass s3cret",
        "    }",
        "    virtual_ipaddress {",
        "        10.0.0.100/24 dev bond0",
        "    }",
        "    track_script {",
        "        fleet_gateway",
        "    }",
        "}",
    ]


def test_priority_follows_the_inventory() -> None:
    gateways = [gateway(f"gw-{n}", f"10.0.0.{n}", interface="eth1") for n in (3, 1, 2)]
    found = [
        line.split()[1]
        for one in gateways
        for line in conf_of(one, gateways).splitlines()
        if line.strip().startswith("priority")
    ]
    assert found == ["200", "199", "198"]
    assert "interface eth1\n" in conf_of(gateways[0], gateways)


def test_groups_of_their_own_do_not_meet() -> None:
    """Two pairs of gateways in one inventory, and a gateway that shares nothing."""
    pair = two()
    other = gateway("gw-03", "10.0.0.3", address="10.0.0.200/24", router_id=52)
    lone = HostSpec(name="gw-04", groups=(), address="10.0.0.4", settings=HostSettings())
    text = conf_of(pair[0], [lone, other, *pair])
    assert "10.0.0.3" not in text
    assert "10.0.0.4" not in text
    assert "priority 200\n" in text
    alone = keepalived.files(other, [other, *pair], {"e0": {"addresses": ["10.0.0.3/24"]}})
    assert "unicast" not in alone[0].content


def test_files_and_their_modes() -> None:
    first, second = two()
    files = {f.path: f for f in keepalived.files(first, [first, second], NICS, "pw")}
    assert set(files) == {keepalived.CONF, keepalived.CHECK, keepalived.UNIT_FILE}
    assert (files[keepalived.CONF].mode, files[keepalived.CONF].secret) == (0o600, True)
    assert files[keepalived.CHECK].mode == 0o755
    for file in files.values():
        assert paths.MARK in "".join(file.content.splitlines(True)[:2])
    # somebody else's keepalived is left alone
    assert "/etc/keepalived/keepalived.conf" not in "".join(f.content for f in files.values())


@pytest.mark.parametrize(
    ("listen", "tls", "asked"),
    [
        (80, None, "/dev/null http://127.0.0.1:80/healthz\n"),
        (
            443,
            {"certificate": "c", "key": "k"},
            "/dev/null --insecure https://127.0.0.1:443/healthz\n",
        ),
    ],
)
def test_the_check_asks_the_clients_port(listen: int, tls: Any, asked: str) -> None:
    settings = Gateway(listen=listen, tls=tls, keepalived=Keepalived(address="10.0.0.100/24"))
    spec = HostSpec(
        name="gw-01",
        groups=(),
        address="10.0.0.1",
        settings=HostSettings(gateway=settings),
    )
    check = keepalived.files(spec, [spec], NICS)[1]
    assert check.content.endswith(asked)
    subprocess.run(["sh", "-n"], input=check.content, text=True, check=True)


@pytest.mark.parametrize(
    ("change", "password", "message"),
    [
        (
            {"address": "10.0.0.2/24"},
            None,
            "gw-01: gateway.keepalived.address: 10.0.0.2 is the own address of gw-02; take one "
            "that no host has",
        ),
        (
            {"address": "fd00::100/64"},
            None,
            "gw-01: gateway.keepalived.address: fd00::100/64 is IPv6, but gw-01 is reached at "
            "10.0.0.1: VRRP needs both of one kind",
        ),
        (
            {},
            "nine-char",
            'gw-01: gateway.keepalived.password_file: must hold 1 to 8 letters, digits, ".", "_" '
            'or "-": VRRP takes no more',
        ),
        (
            {},
            "a#b",
            'gw-01: gateway.keepalived.password_file: must hold 1 to 8 letters, digits, ".", "_" '
            'or "-": VRRP takes no more',
        ),
    ],
)
def test_refused(change: dict[str, Any], password: str | None, message: str) -> None:
    first, second = two(**change)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 the whole message is compared
        keepalived.files(first, [first, second], NICS, password)
    assert str(raised.value) == message


def test_refused_between_gateways() -> None:
    first = two()[0]
    for other in (
        gateway("gw-02", "10.0.0.2", router_id=52),
        gateway("gw-02", "10.0.0.2", address="10.0.0.101/24"),
    ):
        with pytest.raises(ValueError, match="one address goes with one router_id"):
            keepalived.files(first, [first, other], NICS)


def test_an_interface_that_is_not_found_is_told() -> None:
    first, second = two()
    with pytest.raises(ValueError, match=r"no interface of the host has its address 10\.0\.0\.2 "):
        keepalived.files(second, [first, second], NICS)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("keepalived"), reason="needs root and keepalived"
)
@pytest.mark.parametrize("password", [None, "s3cret"])
def test_keepalived_accepts_it(tmp_path: Path, password: str | None) -> None:
    """In a network namespace of its own, as keepalived wants to see the interface."""
    gateways = two(interface="gw0")
    for one in gateways:
        conf = tmp_path / f"{one.name}.conf"
        conf.write_text(conf_of(one, gateways, password).replace(keepalived.CHECK, "/bin/true"))
        network = f"ip link add gw0 type veth peer name gw1 && ip addr add {one.address}/24 dev gw0"
        command = f"{network} && ip link set gw0 up && exec keepalived -t -f {conf}"
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", command], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
