"""The gateway: nginx in front of all pools. Pure: settings and pools in, files out.

The Lua modules that nginx runs are in ``lua/fleet``; each says at its head what it does.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files as resources
from typing import TypedDict

from vllm_fleet import engine, jsontext, paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import PlannedInstance, Pool
from vllm_fleet.render import render
from vllm_fleet.spec.model import ApiKey, HostSpec, Tls

PACKAGES = ("nginx", "libnginx-mod-http-lua", "lua-cjson", "logrotate")

CONF = "/etc/nginx/conf.d/vllm-fleet.conf"
MAIN = "/etc/nginx/modules-enabled/60-vllm-fleet.conf"  # Debian includes these in main context
ETC = "/etc/nginx/vllm-fleet"
KEYS = f"{ETC}/keys.json"  # read again by nginx's workers within seconds of a change
LUA = "/usr/share/vllm-fleet/lua"
DROP_IN = "/etc/systemd/system/nginx.service.d/vllm-fleet.conf"
LOGROTATE = "/etc/logrotate.d/vllm-fleet"
# Marks of drained instances, one file each, "<host>:<instance>"; nginx's master makes it.
DRAINED = "/var/lib/vllm-fleet/drained"
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

# Requests at once of an instance, for each sequence that its engine computes at once: enough that
# it never waits for us, few enough that the order is ours.
AT_ONCE = 1.25
UNKNOWN_SEQS = 1024  # the largest that vLLM takes by itself

# Idle connections that a worker keeps to the instances of a pool: nginx has 768 connections a
# worker by default, for everything, and does not take these back when it runs short.
MIN_IDLE, MAX_IDLE, ALL_IDLE = 4, 64, 256
IDLE_SECONDS = engine.KEEP_ALIVE_SECONDS // 2  # how long; always far less than the engine does

_LENGTH = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgG]?)$")
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}

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
    keys: Sequence[ApiKey],
    *,
    monitors: Sequence[str] = (),
    tls: tuple[str, str] | None = None,
    status_port: int = STATUS_PORT,
) -> list[ManagedFile]:
    """Every file that a gateway host must have, by path; equal input gives equal bytes.

    ``addresses`` maps a host to the IP address at which instances on it are reached, before
    the instance's own; nginx resolves no names later, so each must be an address. ``keys`` are
    those of clients, empty where none is asked for. ``monitors`` are addresses or networks that
    may read /status and /metrics. ``tls`` is (chain, key) as PEM texts, needed where
    ``gateway.tls`` names them. After a change: ``nginx -t``, then reload, never restart; a change
    of ``KEYS`` alone needs neither.

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
    watching = [
        _network(m, f"{spec.name}: {m!r} may read the gateway's /metrics") for m in monitors
    ]
    admins = [
        _network(network, f"{spec.name}: gateway.admin_networks: {network!r} may drain instances")
        for network in sorted(set(settings.admin_networks))
    ]
    longest = settings.longest_answer + settings.hold_seconds
    conf = render(
        "nginx/vllm-fleet.conf.j2",
        mark=paths.MARK,
        lua_dir=LUA,
        etc_dir=ETC,
        drained_dir=DRAINED,
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
        idle_connections=max(MIN_IDLE, min(MAX_IDLE, ALL_IDLE // max(len(data), 1))),
        idle_seconds=IDLE_SECONDS,
        stalled_client_seconds=settings.stalled_client_seconds,
        paths=API_PATHS,
        status_port=status_port,
        status_listen=_addresses(spec, status_port),
        readers=sorted({*watching, *admins}),
        admins=admins,
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
                    "hold_mib": settings.hold_mib,
                    "queue_requests": settings.queue_requests,
                    "queue_seconds": settings.queue_seconds,
                    "affinity": settings.affinity,
                    "session_headers": list(settings.session_headers),
                    "answer_tokens": settings.answer_tokens,
                    "name": spec.name,
                    "longest_answer": settings.longest_answer,
                },
                pools=data,
            ),
        ),
        ManagedFile(
            KEYS,
            _json(required=bool(keys), keys=_keys(spec, keys)),
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
    max_model_len: int | None
    limit: int  # requests at once
    loras: list[str]
    release: str
    vllm_version: str


class _Pool(TypedDict):
    name: str
    aliases: list[str]
    loras: list[str]
    max_model_len: int | None
    upstream: str
    instances: list[_Instance]


def _pools(spec: HostSpec, pools: Sequence[Pool], addresses: Mapping[str, str]) -> list[_Pool]:
    """What the Lua modules know of the pools, by name; instances in declared order."""
    served: dict[str, str] = {}
    result: list[_Pool] = []
    for pool in sorted(pools, key=lambda p: p.name):
        loras = sorted({name for i in pool.instances for name in engine.lora_names(i.args)})
        for name in (pool.name, *pool.aliases, *loras):
            if name in served:
                where = "the LoRA modules" if name in loras else "the `aliases`"
                raise ValueError(
                    f"{spec.name}: the name {name!r} is served by {served[name]!r} and by "
                    f"{pool.name!r}; take it from {where} of one"
                )
            served[name] = pool.name
        lengths = [_max_model_len(i) for i in pool.instances]
        known = [length for length in lengths if length is not None]
        result.append(
            {
                "name": pool.name,
                "aliases": sorted(pool.aliases),
                "loras": loras,
                # The longest request that any instance takes, where that is known.
                "max_model_len": max(known) if known and len(known) == len(lengths) else None,
                "upstream": _upstream(pool.name),
                "instances": [
                    {
                        "host": i.host,
                        "name": i.name,
                        "address": _address(i.host, addresses.get(i.host, i.address)),
                        "port": i.port,
                        "max_model_len": length,
                        "limit": spec.settings.gateway.instance_requests or _limit(i),
                        "loras": sorted(engine.lora_names(i.args)),
                        "release": i.release,
                        "vllm_version": i.vllm_version,
                    }
                    for i, length in zip(pool.instances, lengths, strict=True)
                ],
            }
        )
    return result


def _max_model_len(instance: PlannedInstance) -> int | None:
    """The longest request that an instance takes, where it is known."""
    for value in (instance.args.get("max-model-len"), instance.model.max_model_len):
        # As vLLM reads it: 32k is 32,000, 32K is 32,768; -1 and auto mean what fits.
        if match := _LENGTH.match(str(value)):
            return int(float(match[1]) * _UNITS[match[2]])
    return None


def _limit(instance: PlannedInstance) -> int:
    """Requests at once: what the engine computes together, and some that are ready to go on."""
    seqs, ranks = (instance.args.get(k) for k in ("max-num-seqs", "data-parallel-size"))
    together = seqs if isinstance(seqs, int) else UNKNOWN_SEQS
    return math.ceil(together * (ranks if isinstance(ranks, int) else 1) * AT_ONCE)


def _upstream(name: str) -> str:
    """Name of a pool's upstream block. nginx takes names that differ only in case for one."""
    lower = name.lower()
    if lower == name:
        return f"fleet_{name}"
    return f"fleet_{lower}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


@lru_cache(maxsize=4096)  # each has several instances, of several gateways
def _address(host: str, address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise ValueError(
            f"{host}: the gateway reaches instances by IP address, and {address!r} is none; "
            f"set `address` for {host}"
        ) from None


def _network(address: str, who: str) -> str:
    try:
        return str(ipaddress.ip_network(address, strict=False))
    except ValueError:
        raise ValueError(
            f"{who}, but is no IP address or network; set `address` for that host"
        ) from None


def _networks(listed: Sequence[str]) -> list[str]:
    return sorted({str(ipaddress.ip_network(each, strict=False)) for each in listed})


def _socket(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _listen(spec: HostSpec) -> list[str]:
    """The values of ``listen`` for clients.

    HTTP/2 is asked for here and not by ``http2 on``, which nginx before 1.25.1 does not know;
    later ones take both.
    """
    tls = " ssl http2" if spec.settings.gateway.tls else ""
    return [f"{address}{tls}" for address in _addresses(spec, spec.settings.gateway.listen)]


def _addresses(spec: HostSpec, port: int) -> list[str]:
    """A port on all addresses; IPv6 only where the host uses it, as a kernel may lack it."""
    return [str(port)] + ([f"[::]:{port}"] if ":" in spec.address else [])


def certificate_file(tls: Tls) -> str:
    """The chain that nginx shows to clients, on the gateway."""
    return _certificate(tls)[0]


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


def _keys(spec: HostSpec, keys: Sequence[ApiKey]) -> list[dict[str, object]]:
    """What the gateway knows of each key, by its SHA-256."""
    found: dict[str, ApiKey] = {}
    for key in keys:
        if first := found.get(key.digest):
            raise ValueError(
                f"{spec.name}: the API key {key.name!r} is also the key of {first.name!r}"
            )
        found[key.digest] = key
    values = (
        {
            "name": key.name,
            "sha256": digest,
            "expires": key.ends,
            "expires_text": key.expires,
            "models": list(key.models) if key.models is not None else None,
            "requests_per_minute": key.requests_per_minute,
            "tokens_per_minute": key.tokens_per_minute,
            "concurrent": key.concurrent,
        }
        for digest, key in sorted(found.items())
    )
    return [{name: v for name, v in value.items() if v is not None} for value in values]


def _json(**values: object) -> str:
    return jsontext.lines({"_": paths.MARK, **dict(sorted(values.items()))})


def _lua() -> list[ManagedFile]:
    modules = resources("vllm_fleet.gateway") / "lua" / "fleet"
    return [
        ManagedFile(
            f"{LUA}/fleet/{module.name}", f"-- {paths.MARK}\n{module.read_text(encoding='utf-8')}"
        )
        for module in modules.iterdir()
        if module.name.endswith(".lua")
    ]
