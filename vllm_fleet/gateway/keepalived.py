"""One address for several gateways: keepalived's files. Pure: settings and addresses in, files out.

keepalived runs under a unit of ours with a configuration of ours, so that one that somebody has
set up on the host goes on as it is. The address stays where it is until its holder fails: each
move cuts the connections that run over it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_fleet import paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.render import render
from vllm_fleet.spec.model import HostSpec

PACKAGES = ("keepalived", "curl")

CONF = "/etc/keepalived/vllm-fleet.conf"
CHECK = "/usr/share/vllm-fleet/check-gateway"
UNIT = "vllm-fleet-keepalived.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"

FIRST_PRIORITY = 200
PASSWORD = re.compile(r"[A-Za-z0-9._-]{1,8}")


def files(
    spec: HostSpec,
    gateways: Sequence[HostSpec],
    nics: Mapping[str, Mapping[str, Any]],
    password: str | None = None,
) -> list[ManagedFile]:
    """The files of a gateway host that shares an address; none where it shares none.

    ``gateways`` are all gateways in the inventory's order, which is the order in which they take
    the address. ``nics`` are the host's interfaces, as the large fact has them. Raises ValueError,
    naming host and setting, for what cannot work.
    """
    settings = spec.settings.gateway.keepalived
    if settings is None:
        return []
    where = f"{spec.name}: gateway.keepalived"
    group = _group(spec, gateways)
    shared = ipaddress.ip_interface(settings.address)
    for one in group:
        own = ipaddress.ip_address(one.address)
        if own.version != shared.version:
            raise ValueError(
                f"{where}.address: {settings.address} is IPv{shared.version}, but {one.name} is "
                f"reached at {own}: VRRP needs both of one kind"
            )
        if own == shared.ip:
            raise ValueError(
                f"{where}.address: {shared.ip} is the own address of {one.name}; take one that no "
                "host has"
            )
    if password is not None:
        password = password.strip()
        if shared.version == 6:
            raise ValueError(
                f"{where}.password_file: VRRP over IPv6 knows no password; take it away"
            )
        if not PASSWORD.fullmatch(password):
            raise ValueError(
                f'{where}.password_file: must hold 1 to 8 letters, digits, ".", "_" or "-": VRRP '
                "takes no more"
            )
    conf = render(
        "keepalived/vllm-fleet.conf.j2",
        mark=paths.MARK,
        name=spec.name,
        check=CHECK,
        interface=settings.interface or _interface(spec, nics),
        router_id=settings.router_id,
        priority=FIRST_PRIORITY - group.index(spec),
        own=spec.address,
        peers=[one.address for one in group if one is not spec],
        password=password,
        address=str(shared),
    )
    gateway = spec.settings.gateway
    check = render(
        "keepalived/check-gateway.j2",
        mark=paths.MARK,
        url=f"{'https' if gateway.tls else 'http'}://127.0.0.1:{gateway.listen}/healthz",
        tls=gateway.tls is not None,
    )
    unit = render("keepalived/vllm-fleet-keepalived.service.j2", mark=paths.MARK, conf=CONF)
    return [
        ManagedFile(CONF, conf, mode=0o600, secret=password is not None),
        ManagedFile(CHECK, check, mode=0o755),
        ManagedFile(UNIT_FILE, unit),
    ]


def _group(spec: HostSpec, gateways: Sequence[HostSpec]) -> list[HostSpec]:
    """The gateways that share this one's address, in the inventory's order."""
    mine = spec.settings.gateway.keepalived
    assert mine is not None, "asked only where it is set"
    group = []
    for one in gateways:
        other = one.settings.gateway.keepalived
        if other is None:
            continue
        same_address = ipaddress.ip_interface(other.address) == ipaddress.ip_interface(mine.address)
        if same_address != (other.router_id == mine.router_id):
            raise ValueError(
                f"{spec.name}: gateway.keepalived: {one.name} has address {other.address} and "
                f"router_id {other.router_id}, {spec.name} has {mine.address} and "
                f"{mine.router_id}: one address goes with one router_id, on every gateway"
            )
        if same_address:
            group.append(one)
    if len(group) > FIRST_PRIORITY:
        raise ValueError(f"{spec.name}: gateway.keepalived: more than {FIRST_PRIORITY} gateways")
    return group


def _interface(spec: HostSpec, nics: Mapping[str, Mapping[str, Any]]) -> str:
    own = ipaddress.ip_address(spec.address)
    for name, nic in nics.items():
        if any(ipaddress.ip_interface(a).ip == own for a in nic.get("addresses", [])):
            return name
    raise ValueError(
        f"{spec.name}: gateway.keepalived.interface: no interface of the host has its address "
        f"{spec.address} ({', '.join(nics) or 'none found'}); name the one that is to carry "
        "the shared address"
    )
