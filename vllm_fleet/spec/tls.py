"""Checks of a gateway's `tls`: one of three ways, and a pair of files that nginx will take."""

from __future__ import annotations

from vllm_fleet.certificates import expiring, problems
from vllm_fleet.spec.findings import At, Findings
from vllm_fleet.spec.layers import Loaded, LoadedHost
from vllm_fleet.spec.model import Tls

ACME_PORT = 80  # where an authority looks for the proof; RFC 8555, 8.3

_PAIRS = (("certificate", "key"), ("host_certificate", "host_key"))


def check_tls(found: Findings, warnings: Findings, loaded: Loaded) -> None:
    """Complaints and warnings about the certificate of every gateway."""
    for host in loaded.hosts:
        tls = host.settings.gateway.tls if "gateway" in host.host.groups else None
        if tls is not None:
            _way(found, host, tls)
            _files(found, warnings, loaded, host, tls)


def _at(host: LoadedHost, *keys: str) -> At:
    return At(host.sources["gateway"], ("gateway", "tls", *keys))


def _way(found: Findings, host: LoadedHost, tls: Tls) -> None:
    ways = [
        name
        for name, given in (
            ("certificate and key", tls.certificate or tls.key),
            ("host_certificate and host_key", tls.host_certificate or tls.host_key),
            ("acme", tls.acme),
        )
        if given
    ]
    if len(ways) != 1:
        said = f"has {' as well as '.join(ways)}" if ways else "names no certificate"
        text = f"{said}; give one of: certificate and key, host_certificate and host_key, acme"
        found.say(_at(host), text)
        return
    for pair in _PAIRS:
        for name, other in (pair, pair[::-1]):
            if getattr(tls, name) and not getattr(tls, other):
                found.say(_at(host, name), f"needs {other} beside it")
    if tls.acme is None:
        return
    if host.settings.gateway.listen == ACME_PORT:
        text = f"the authority looks at port {ACME_PORT}, which clients have; listen elsewhere: 443"
        found.say(_at(host, "acme"), text)
    for index, domain in enumerate(tls.acme.domains):
        if domain.startswith("*."):
            at = At(host.sources["gateway"], ("gateway", "tls", "acme", "domains", index))
            text = (
                "a star is proved by DNS alone, which is not done here; list each name, or "
                "renew it yourself and name the files in host_certificate and host_key"
            )
            found.say(at, text)


def _files(found: Findings, warnings: Findings, loaded: Loaded, host: LoadedHost, tls: Tls) -> None:
    """The pair on this machine; what cannot be read was complained of already."""
    if not (tls.certificate and tls.key):
        return
    try:
        chain = (loaded.root / tls.certificate).read_bytes()
        key = (loaded.root / tls.key).read_bytes()
    except OSError:
        return
    if not (chain and key):
        return
    bad = problems(chain, key, tls.names)
    for problem in bad:
        name = tls.certificate if problem.where == "certificate" else tls.key
        found.say(_at(host, problem.where), f'"{name}": {problem.text}')
    if not bad and (text := expiring(chain)):
        warnings.say(_at(host, "certificate"), f'"{tls.certificate}": {text}')
