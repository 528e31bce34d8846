"""Names of hosts to the IP addresses at which other hosts reach them."""

from __future__ import annotations

import ipaddress
import socket

from vllm_fleet import airgap
from vllm_fleet.spec.complaints import Complaint, SpecError
from vllm_fleet.spec.model import Fleet, HostSpec


def resolved(fleet: Fleet) -> Fleet:
    """The fleet with an IP address for every host; gateways take no names.

    Hosts without internet are pointed to their bundle (:mod:`vllm_fleet.airgap`). Names are looked
    up on the operator's machine. Raises SpecError naming every host whose
    address cannot be found.
    """
    hosts: list[HostSpec] = []
    complaints: list[Complaint] = []
    for host in fleet.hosts:
        address = lookup(host.address)
        if address is None:
            text = (
                f"host {host.name}: {host.address!r} is no IP address and this machine cannot "
                "look it up; set `address` for the host in the inventory"
            )
            complaints.append(Complaint(fleet.inventory, 0, 0, "", text))
        hosts.append(host.model_copy(update={"address": address or host.address}))
    if complaints:
        raise SpecError(complaints)
    return airgap.pointed(fleet.model_copy(update={"hosts": tuple(hosts)}))


def lookup(name: str) -> str | None:
    """IP address of a name, IPv4 first; the name itself where it is one; None if unknown."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])
