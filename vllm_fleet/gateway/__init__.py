"""The gateway: nginx in front of all pools. Pure: settings and pools in, files out.

The Lua modules that nginx runs are in ``lua/fleet``; each says at its head what it does.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from typing import TypedDict

from vllm_fleet import paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import Pool
from vllm_fleet.render import render
from vllm_fleet.spec.model import HostSpec, Tls

PACKAGES = ("nginx", "libnginx-mod-http-lua", "lua-cjson", "logrotate")

CONF = "/etc/nginx/conf.d/vllm-fleet.conf"
MAIN = "/etc/nginx/modules-enabled/60-vllm-fleet.conf"  # Debian includes these in main context
ETC = "/etc/nginx/vllm-fleet"
LUA = "/usr/share/vllm-fleet/lua"
DROP_IN = "/etc/systemd/system/nginx.service.d/vllm-fleet.conf"
LOGROTATE = "/etc/logrotate.d/vllm-fleet"
ACCESS_LOG = "/var/log/nginx/vllm-fleet.access.json"
STATUS_PORT = 9145
TLS_UNIT = "vllm-fleet-tls"  # .path sees that a certificate on the host changed, .service reloads
UNITS = "/etc/systemd/system"

# A certificate from an authority: certbot's hook puts chain and key into one file, so that nginx
# never reads the one without the other.
ACME_PACKAGES = ("certbot", "openssl")
ACME_TIMER = "certbot.timer"  # of the package; renews what is due, twice a day
ACME_NAME = "vllm-fleet"  # of the certificate, for certbot
ACME_PEM = f"{ETC}/acme.pem"
ACME_HOOK = "/usr/share/vllm-fleet/renewed.sh"
ACME_WEBROOT = f"{paths.STATE}/acme"

# What clients may ask, below /v1/; everything else is closed.
API_PATHS = (
    "chat/completions",
    "completions",
    "embeddings",
    "messages",
    "messages/count_tokens",
    "rerank",
    "responses",
    "score",
)


def files(
    spec: HostSpec,
    pools: Sequence[Pool],
    addresses: Mapping[str, str],
    keys: Sequence[tuple[str, str]],
    *,
    monitors: Sequence[str] = (),
    tls: tuple[str, str] | None = None,
    status_port: int = STATUS_PORT,
) -> list[ManagedFile]:
    """Every file that a gateway host must have, by path; equal input gives equal bytes.

    ``addresses`` maps a host to the IP address at which instances on it are reached, before
    the instance's own; nginx resolves no names later, so each must be an address. ``keys`` are
    (name, key) of clients, empty where none is asked for. ``monitors`` are addresses or networks
    that may read /status and /metrics. ``tls`` is (chain, key) as PEM texts, needed where
    ``gateway.tls`` names them. After a change: ``nginx -t``, then reload, never restart.

    Raises ValueError, naming host and setting, for what cannot work.
    """
    settings = spec.settings.gateway
    if settings.tls and settings.tls.certificate and tls is None:
        raise ValueError(f"{spec.name}: gateway.tls is set, but certificate and key were not read")
    if settings.listen == status_port:
        raise ValueError(
            f"{spec.name}: gateway.listen: {status_port} is the port of /status and /metrics; "
            "choose another"
        )
    data = _pools(spec, pools, addresses)
    longest = settings.longest_answer + settings.hold_seconds
    conf = render(
        "nginx/vllm-fleet.conf.j2",
        mark=paths.MARK,
        lua_dir=LUA,
        etc_dir=ETC,
        access_log=ACCESS_LOG,
        pools=[
            {
                "name": pool["name"],
                "aliases": pool["aliases"],
                "upstream": pool["upstream"],
                "servers": [
                    {
                        "address": _socket(instance["address"], instance["port"]),
                        "id": f"{instance['host']}/{instance['name']}",
                    }
                    for instance in pool["instances"]
                ],
            }
            for pool in data
        ],
        listen=_listen(spec),
        tls=_certificate(settings.tls) if settings.tls else None,
        acme=_acme(spec),
        max_body_mib=settings.max_body_mib,
        connections=settings.connections_per_address,
        unlimited=_networks(settings.connections_unlimited),
        longest_answer=settings.longest_answer,
        paths=API_PATHS,
        status_port=status_port,
        monitors=[_network(spec, m) for m in sorted(set(monitors))],
    )
    result = [
        ManagedFile(CONF, conf),
        ManagedFile(
            MAIN, render("nginx/main.conf.j2", mark=paths.MARK, worker_shutdown=longest + 60)
        ),
        ManagedFile(
            DROP_IN, render("nginx/nginx.service.conf.j2", mark=paths.MARK, stop=longest + 90)
        ),
        ManagedFile(
            LOGROTATE, render("nginx/logrotate.j2", mark=paths.MARK, access_log=ACCESS_LOG)
        ),
        ManagedFile(
            f"{ETC}/pools.json",
            _json(
                settings={
                    "hold_seconds": settings.hold_seconds,
                    "hold_requests": settings.hold_requests,
                },
                pools=data,
            ),
        ),
        ManagedFile(
            f"{ETC}/keys.json",
            _json(keys=_keys(spec, keys)),
            mode=0o640,
            group="www-data",
            secret=True,
        ),
        *_lua(),
    ]
    if settings.tls and settings.tls.certificate and tls is not None:
        # OpenSSL skips text before the first block.
        mark = f"# {paths.MARK}\n"
        result += [
            ManagedFile(f"{ETC}/tls.crt", mark + tls[0]),
            ManagedFile(f"{ETC}/tls.key", mark + tls[1], mode=0o600, secret=True),
        ]
    if settings.tls and settings.tls.host_certificate:
        watched = _certificate(settings.tls)
        result += [
            ManagedFile(
                f"{UNITS}/{TLS_UNIT}.{kind}",
                render(
                    f"nginx/tls.{kind}.j2",
                    mark=paths.MARK,
                    files=watched,
                    folders=sorted({path.rpartition("/")[0] or "/" for path in watched}),
                ),
            )
            for kind in ("path", "service")
        ]
    if settings.tls and settings.tls.acme:
        hook = render("nginx/renewed.sh.j2", mark=paths.MARK, pem=ACME_PEM)
        result.append(ManagedFile(ACME_HOOK, hook, mode=0o755))
        if proxy := acme_environment(spec):
            lines = "".join(f'Environment="{name}={value}"\n' for name, value in proxy.items())
            path = f"{UNITS}/certbot.service.d/vllm-fleet.conf"
            result.append(ManagedFile(path, f"# {paths.MARK}\n[Service]\n{lines}"))
    return sorted(result, key=lambda file: file.path)


def acme_environment(spec: HostSpec) -> dict[str, str]:
    """The proxy by which certbot reaches the authority; empty where it needs none."""
    proxy = spec.settings.proxy
    named = {"http_proxy": proxy.http, "https_proxy": proxy.https, "no_proxy": proxy.no_proxy}
    return {name: value for name, value in named.items() if value}


def acme_command(spec: HostSpec) -> tuple[str, ...] | None:
    """certbot's words that fetch the certificate of the settings; None without ``tls.acme``.

    Only for a certificate that is not there yet, or not for these names: it asks for a new one
    each time, and authorities count.
    """
    acme = spec.settings.gateway.tls.acme if spec.settings.gateway.tls else None
    if acme is None:
        return None
    return (
        *("certbot", "certonly", "--non-interactive", "--agree-tos", "--quiet"),
        *("--cert-name", ACME_NAME, "--email", acme.email, "--server", acme.directory),
        *("--webroot", "--webroot-path", ACME_WEBROOT, "--deploy-hook", ACME_HOOK),
        *("--force-renewal", "--renew-with-new-domains"),
        *(word for domain in acme.domains for word in ("--domain", domain)),
    )


class _Instance(TypedDict):
    host: str
    name: str
    address: str
    port: int


class _Pool(TypedDict):
    name: str
    aliases: list[str]
    max_model_len: int | None
    upstream: str
    instances: list[_Instance]


def _pools(spec: HostSpec, pools: Sequence[Pool], addresses: Mapping[str, str]) -> list[_Pool]:
    """What the Lua modules know of the pools, by name; instances in declared order."""
    served: dict[str, str] = {}
    result: list[_Pool] = []
    for pool in sorted(pools, key=lambda p: p.name):
        for name in (pool.name, *pool.aliases):
            if name in served:
                raise ValueError(
                    f"{spec.name}: the name {name!r} is served by {served[name]!r} and by "
                    f"{pool.name!r}; take it from the `aliases` of one"
                )
            served[name] = pool.name
        result.append(
            {
                "name": pool.name,
                "aliases": sorted(pool.aliases),
                "max_model_len": _max_model_len(pool),
                "upstream": _upstream(pool.name),
                "instances": [
                    {
                        "host": i.host,
                        "name": i.name,
                        "address": _address(i.host, addresses.get(i.host, i.address)),
                        "port": i.port,
                    }
                    for i in pool.instances
                ],
            }
        )
    return result


def _max_model_len(pool: Pool) -> int | None:
    """The longest request that every instance takes, where it is known."""
    known = [v for i in pool.instances if isinstance(v := i.args.get("max-model-len"), int)]
    if pool.instances and len(known) == len(pool.instances):
        return min(known)
    return pool.model.max_model_len if isinstance(pool.model.max_model_len, int) else None


def _upstream(name: str) -> str:
    """Name of a pool's upstream block. nginx takes names that differ only in case for one."""
    lower = name.lower()
    if lower == name:
        return f"fleet_{name}"
    return f"fleet_{lower}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _address(host: str, address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise ValueError(
            f"{host}: the gateway reaches instances by IP address, and {address!r} is none; "
            f"set `address` for {host}"
        ) from None


def _network(spec: HostSpec, address: str) -> str:
    try:
        return str(ipaddress.ip_network(address, strict=False))
    except ValueError:
        raise ValueError(
            f"{spec.name}: {address!r} may read the gateway's /metrics, but is no IP address or "
            "network; set `address` for that host"
        ) from None


def _networks(listed: Sequence[str]) -> list[str]:
    return sorted({str(ipaddress.ip_network(each, strict=False)) for each in listed})


def _socket(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _listen(spec: HostSpec) -> list[str]:
    """The values of ``listen``; IPv6 only where the host uses it, as a kernel may lack it.

    HTTP/2 is asked for here and not by ``http2 on``, which nginx before 1.25.1 does not know;
    later ones take both.
    """
    tls = " ssl http2" if spec.settings.gateway.tls else ""
    port = spec.settings.gateway.listen
    return [f"{port}{tls}"] + ([f"[::]:{port}{tls}"] if ":" in spec.address else [])


def _certificate(tls: Tls) -> tuple[str, str]:
    """Where nginx finds chain and key."""
    if tls.host_certificate and tls.host_key:
        return tls.host_certificate, tls.host_key
    if tls.acme:
        return ACME_PEM, ACME_PEM
    return f"{ETC}/tls.crt", f"{ETC}/tls.key"


def _acme(spec: HostSpec) -> dict[str, object] | None:
    """What the server on port 80 needs, which the authority asks."""
    tls = spec.settings.gateway.tls
    if tls is None or tls.acme is None:
        return None
    return {
        "domains": tls.acme.domains,
        "webroot": ACME_WEBROOT,
        "ipv6": ":" in spec.address,
    }


def _keys(spec: HostSpec, keys: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    digests: dict[str, str] = {}
    for name, key in keys:
        digest = hashlib.sha256(key.encode()).hexdigest()
        if not key or digest in digests:
            problem = "is empty" if not key else f"is also the key of {digests[digest]!r}"
            raise ValueError(f"{spec.name}: the API key {name!r} {problem}")
        digests[digest] = name
    return [{"name": digests[d], "sha256": d} for d in sorted(digests)]


def _json(**values: object) -> str:
    return json.dumps({"_": paths.MARK, **values}, indent=1, sort_keys=True) + "\n"


def _lua() -> list[ManagedFile]:
    modules = resources("vllm_fleet.gateway") / "lua" / "fleet"
    return [
        ManagedFile(
            f"{LUA}/fleet/{module.name}", f"-- {paths.MARK}\n{module.read_text(encoding='utf-8')}"
        )
        for module in modules.iterdir()
        if module.name.endswith(".lua")
    ]
