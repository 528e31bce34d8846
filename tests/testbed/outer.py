"""What the outer machine is: pure readers over the texts it gives.

Nothing here runs a command or opens a file; :mod:`tests.testbed.base` and
:mod:`tests.testbed.fabric` fetch the texts.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

# --- release ------------------------------------------------------------------------------

SUPPORTED = {"debian": (12, 0), "ubuntu": (22, 4)}  # oldest release of each on hosts
FALLBACK_SUITE = "bookworm"


@dataclass(frozen=True)
class Release:
    """A distribution's release; ``own`` says that it is the outer machine's."""

    distribution: str
    suite: str
    own: bool


def host_release(os_release: str) -> Release:
    """The release that test hosts get: the outer machine's where supported, else Debian 12."""
    values = {
        key: value.strip("\"'")
        for key, _, value in (line.partition("=") for line in os_release.splitlines())
        if value
    }
    distribution = values.get("ID", "")
    oldest = SUPPORTED.get(distribution)
    version = re.match(r"(\d+)(?:\.(\d+))?$", values.get("VERSION_ID", ""))
    suite = values.get("VERSION_CODENAME") or values.get("UBUNTU_CODENAME", "")
    if oldest and version and suite and (int(version[1]), int(version[2] or 0)) >= oldest:
        return Release(distribution, suite, own=True)
    return Release("debian", FALLBACK_SUITE, own=False)


# --- apt ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One apt source of binary packages. ``key`` is an inline signing key (deb822 only)."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str | None = None
    key: str | None = None
    trusted: bool = False

    def lines(self, signed_by: str | None = None) -> list[str]:
        """In the one-line format, which every mmdebstrap reads; ``signed_by`` replaces a key."""
        options = []
        if signed_by or self.signed_by:
            options.append(f"signed-by={signed_by or self.signed_by}")
        if self.trusted:
            options.append("trusted=yes")
        bracket = f"[{' '.join(options)}] " if options else ""
        return [
            f"deb {bracket}{uri} {suite} {' '.join(self.components)}".rstrip()
            for uri in self.uris
            for suite in self.suites
        ]


def parse_sources(text: str, deb822: bool) -> list[Source]:
    """The enabled binary sources of one file: deb822 (``*.sources``) or one-line (``*.list``)."""
    return _deb822(text) if deb822 else _one_line(text)


def _deb822(text: str) -> list[Source]:
    sources = []
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and last:
                fields[last] += "\n" + line.strip()
            elif ":" in line:
                last, _, value = line.partition(":")
                last = last.strip().lower()
                fields[last] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled") == "no":
            continue
        signed = fields.get("signed-by", "").strip()
        inline = "BEGIN PGP" in signed
        # a line with a single dot stands for an empty one
        key = re.sub(r"^\.$", "", signed, flags=re.MULTILINE) + "\n" if inline else None
        sources.append(
            Source(
                uris=tuple(fields.get("uris", "").split()),
                suites=tuple(fields.get("suites", "").split()),
                components=tuple(fields.get("components", "").split()),
                signed_by=signed if signed and not inline else None,
                key=key,
                trusted=fields.get("trusted") == "yes",
            )
        )
    return sources


def _one_line(text: str) -> list[Source]:
    sources = []
    for line in text.splitlines():
        found = re.match(r"deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line.strip())
        if not found or found[2].startswith("cdrom:"):
            continue
        words = (option.partition("=") for option in (found[1] or "").split())
        options = {key: value for key, _, value in words}
        sources.append(
            Source(
                uris=(found[2],),
                suites=(found[3],),
                components=tuple(found[4].split()),
                signed_by=options.get("signed-by"),
                trusted=options.get("trusted") == "yes",
            )
        )
    return sources


def official(sources: Iterable[Source], release: Release) -> list[Source]:
    """The distribution's own sources, or none where the release's main suite is not among them.

    Sources of other vendors are left out: a test host must not need their keys.
    """
    wanted = {release.suite, *(f"{release.suite}-{p}" for p in ("updates", "security"))}
    kept = []
    for source in sources:
        suites = tuple(s for s in source.suites if s in wanted)
        keyring = (source.signed_by or "").rsplit("/", 1)[-1]
        vendor = keyring and "archive" not in keyring and release.distribution not in keyring
        if suites and "main" in source.components and not vendor:
            kept.append(replace(source, suites=suites))
    return kept if any(release.suite in s.suites for s in kept) else []


def source_files(sources: Iterable[Source]) -> list[str]:
    """Files of the outer machine that the sources name: keyrings and mirror lists."""
    files = set()
    for source in sources:
        if source.signed_by and source.signed_by.startswith("/"):
            files.add(source.signed_by)
        for uri in source.uris:
            if uri.startswith("mirror+file:"):
                files.add("/" + uri.removeprefix("mirror+file:").lstrip("/"))
    return sorted(files)


# Reaching mirrors, not how a machine stores what it fetched: an image's settings that empty
# the package cache or compress the lists (docker-clean and its kin) must not reach a host.
_REACHING = re.compile(
    r"Acquire::(https?::|ftp::|Retries|ForceIPv[46]|Queue-Mode|Check-Valid-Until|Check-Date"
    r"|Max-FutureTime|AllowInsecureRepositories|AllowWeakRepositories)"
)


def apt_settings(dump: str, environment: dict[str, str] | None = None) -> list[str]:
    """The settings for reaching mirrors out of ``apt-config dump``, one ``Key "value";`` each.

    Proxies that only the environment names are added, since a host does not inherit it.
    """
    kept = [
        line for line in dump.splitlines() if _REACHING.match(line) and not line.endswith(' "";')
    ]
    for scheme in ("http", "https"):
        proxy = (environment or {}).get(f"{scheme}_proxy")
        key = f"Acquire::{scheme}::Proxy"
        if proxy and not any(line.startswith(key + " ") for line in kept):
            kept.append(f'{key} "{proxy}";')
    return kept


def settings_files(settings: Iterable[str]) -> list[str]:
    """Files that apt settings name: certificates, keys, proxy scripts."""
    values = (re.search(r'"(/[^"]+)";$', line) for line in settings)
    return sorted({found[1] for found in values if found})


# --- network ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    """Addresses of one bed: ``10.<second>.0.0/24`` for hosts, a small transit net beside it."""

    second: int = 77

    @property
    def hosts(self) -> str:
        return f"10.{self.second}.0.0/24"

    @property
    def fabric(self) -> str:
        """Address of the fabric: the hosts' router, and where hub and wheels are served."""
        return self.host(1)

    @property
    def transit(self) -> str:
        return f"10.{self.second}.255.0/30"

    @property
    def outer_end(self) -> str:
        return f"10.{self.second}.255.1"

    @property
    def fabric_end(self) -> str:
        return f"10.{self.second}.255.2"

    def host(self, last: int) -> str:
        return f"10.{self.second}.0.{last}"


def taken_networks(routes: str, resolv_conf: str = "") -> list[ipaddress.IPv4Network]:
    """Networks in use: from ``ip -4 route show table all``, and the name servers' addresses."""
    found = []
    for line in routes.splitlines():
        words = line.split()
        if words and words[0] in ("local", "broadcast", "unreachable", "blackhole", "throw"):
            words = words[1:]
        if not words or words[0] == "default":
            continue
        try:
            found.append(ipaddress.IPv4Network(words[0], strict=False))
        except ValueError:
            continue  # IPv6 or a keyword of another kind of route
    for server in nameservers(resolv_conf):
        if ":" not in server:
            found.append(ipaddress.IPv4Network(server))
    return found


def free_net(taken: Sequence[ipaddress.IPv4Network], first: int = 77) -> Net | None:
    """The first net from ``10.<first>`` on that overlaps nothing in use; None when all are."""
    for second in [*range(first, 256), *range(1, first)]:
        net = Net(second)
        ours = [ipaddress.IPv4Network(net.hosts), ipaddress.IPv4Network(net.transit)]
        # a bare 0.0.0.0/0 or 0.0.0.0/1 (VPN clients) is a default route in disguise
        if not any(t.prefixlen > 1 and t.overlaps(o) for t in taken for o in ours):
            return net
    return None


def default_interface(routes: str) -> str | None:
    """The interface of the default route with the lowest metric; None without one."""
    best: tuple[int, str] | None = None
    for line in routes.splitlines():
        device = re.match(r"default\b.*?\bdev (\S+)", line)
        if device and " table " not in line:
            metric = re.search(r"\bmetric (\d+)", line)
            candidate = (int(metric[1]) if metric else 0, device[1])
            best = min(best, candidate) if best else candidate
    return best[1] if best else None


def nameservers(resolv_conf: str) -> list[str]:
    """The name servers of a resolv.conf."""
    return re.findall(r"^\s*nameserver\s+(\S+)", resolv_conf, flags=re.MULTILINE)


def host_resolv_conf(*candidates: str) -> str:
    """A resolv.conf for hosts: the first candidate whose servers are reachable from outside.

    A stub on a loopback address (systemd-resolved, dnsmasq) answers the outer machine alone.
    Time-outs are short, so that a host without a way out says so quickly.
    """
    for text in candidates:
        servers = [s for s in nameservers(text) if not s.startswith("127.") and s != "::1"]
        if servers:
            lines = [f"nameserver {s}" for s in servers]
            return "\n".join([*lines, "options timeout:1 attempts:1"]) + "\n"
    return ""


def forward_is_dropped(iptables_rules: str) -> bool:
    """Whether ``iptables -S FORWARD`` shows a policy of DROP, as Docker sets it."""
    return re.search(r"^-P FORWARD DROP", iptables_rules, flags=re.MULTILINE) is not None


# --- cgroups ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cgroups:
    """How cgroups are mounted. ``unified`` is where cgroup2 is, None where it is not."""

    layout: str  # v2 | hybrid | v1 | none
    unified: str | None = None
    controllers: tuple[str, ...] = field(default=())  # those on v1


def cgroups(mountinfo: str) -> Cgroups:
    """The cgroup layout out of ``/proc/self/mountinfo``."""
    unified = None
    controllers = []
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        words, tail = before.split(), after.split()
        if not dash or len(words) < 5 or not tail:
            continue
        mountpoint = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[4])
        if tail[0] == "cgroup2" and unified is None:
            unified = mountpoint
        elif tail[0] == "cgroup":
            controllers.append(mountpoint.rsplit("/", 1)[-1])
    if unified and controllers:
        return Cgroups("hybrid", unified, tuple(controllers))
    if unified:
        return Cgroups("v2", unified)
    return Cgroups("v1" if controllers else "none", None, tuple(controllers))
