"""Checks of hosts without internet: nothing may name a place outside, everything is pinned."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_fleet import listings as frozen
from vllm_fleet.spec.complaints import Loc
from vllm_fleet.spec.findings import At, Findings, placed
from vllm_fleet.spec.layers import Loaded, LoadedHost
from vllm_fleet.spec.model import Acme
from vllm_fleet.spec.words import nearest

PUBLIC_ACME = Acme.model_fields["directory"].default


def check_air_gapped(found: Findings, loaded: Loaded, *, listings: bool = True) -> None:
    """What contradicts `air_gapped`, host by host.

    ``listings``: whether the models' listings and the releases' locks must be there.
    """
    for host in loaded.hosts:
        gap = host.settings.air_gapped
        if gap is None or "air_gapped" not in host.sources:
            continue
        _host_of_it(found, loaded, host)
        for loc, why in _outside(host):
            layer = host.sources.get(str(loc[0]))
            if layer is not None:
                text = f"{{hosts}}: {why}, and with `air_gapped` nothing comes from elsewhere: "
                text += f"take it out; {gap.host} serves the bundle to all hosts"
                found.say(At(layer, loc), text, host.host.name)
        if listings and "gpu" in host.host.groups:
            _pinned(found, loaded, host)


def _host_of_it(found: Findings, loaded: Loaded, host: LoadedHost) -> None:
    """The host that serves is one of the inventory, and has the same settings."""
    gap = host.settings.air_gapped
    assert gap is not None, "called for hosts that have it"
    at = At(host.sources["air_gapped"], ("air_gapped", "host"))
    if loaded.inventory.complaints:
        return  # its hosts are not known
    others = {one.host.name: one for one in loaded.hosts}
    if gap.host not in others:
        near = nearest(gap.host, others)
        hint = f'; did you mean "{near}"?' if near else ""
        found.say(at, f'"{gap.host}" is no host of {loaded.inventory.file}{hint}')
    elif others[gap.host].settings.air_gapped != gap:
        text = (
            f"{gap.host} has other `air_gapped` settings than {{hosts}}: set it once, in "
            "group_vars/all.yml"
        )
        found.say(at, text, host.host.name)


def _outside(host: LoadedHost) -> Iterator[tuple[Loc, str]]:
    """Settings that name a place outside, and what they say."""
    settings, groups = host.settings, host.host.groups
    index = settings.package_index
    for key in ("index_url", "extra_index_urls", "find_links"):
        if getattr(index, key):
            yield ("package_index", key), "packages come from here"
    hub = settings.hub
    for key in ("endpoint", "huggingface_endpoint"):
        if getattr(hub, key):
            yield ("hub", key), "weights come from here"
    for key in ("http", "https"):
        if getattr(settings.proxy, key):
            yield ("proxy", key), "a proxy is a way out"
    acme = settings.gateway.tls.acme if settings.gateway.tls else None
    if "gateway" in groups and acme is not None and acme.directory == PUBLIC_ACME:
        yield ("gateway", "tls", "acme"), f"the certificate comes from {PUBLIC_ACME}"


def _pinned(found: Findings, loaded: Loaded, host: LoadedHost) -> None:
    """A lock for every release and a frozen listing for all weights."""
    if host.settings.vllm_lock is None and any(placed(host)):
        text = (
            "{hosts}: has no lock, and a bundle holds what locks name: `fleet lock VERSION` makes "
            "one, then set vllm_lock"
        )
        found.say(At(host.sources["air_gapped"], ("air_gapped",)), text, host.host.name)
    source = host.sources.get("models")
    for name in dict.fromkeys(one.model for _, one in placed(host)):
        model = source.models.get(name) if source else None
        if model is None or source is None or model.source == "path":
            continue
        path = frozen.path_of(name, model)
        if not (loaded.root / path).is_file():
            text = (
                f"has no frozen listing ({path}), and a bundle holds what listings name: "
                "`fleet bundle`, or `fleet plan --fetch-listings`, makes it on a machine with "
                "internet"
            )
            found.say(At(source, ("models", name)), text, at_key=True)
