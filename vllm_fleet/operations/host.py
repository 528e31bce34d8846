"""Packages, files and services of a host, compared with the one large fact."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Sequence

from pyinfra import host
from pyinfra.api import operation

from vllm_fleet import airgap, alertmanager, firewall, paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.gateway import keepalived
from vllm_fleet.host_plan import HostPlan, Service
from vllm_fleet.operations.remote import Command, Script, inline, installed

# Checked on the host before a changed file stays: (paths that matter, command, what to do).
CHECKS = (
    (("/etc/nginx/",), ("nginx", "-t", "-q"), ""),
    (
        ("/etc/prometheus/vllm-fleet",),
        ("promtool", "check", "config", "/etc/prometheus/vllm-fleet.yml"),
        "",
    ),
    (
        (alertmanager.CONFIG,),
        ("amtool", "check-config", alertmanager.CONFIG),
        "",
    ),
    (
        (firewall.FILE,),
        ("nft", "-c", "-f", firewall.FILE),
        "where this kernel has no nf_tables, set `firewall: false` and close the instances' "
        "ports elsewhere",
    ),
    ((keepalived.CONF,), ("keepalived", "-t", "-f", keepalived.CONF), ""),
)
APT_FILES = ("/etc/apt/sources.list.d/", "/etc/apt/keyrings/")
APT = "DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -q"


@operation()
def packages(plan: HostPlan) -> Generator[Command, None, None]:
    """Install the Debian packages that are missing."""
    if not plan.missing_packages:
        host.noop("every package is installed")
        return
    sources = [
        file
        for file in plan.changed_files
        if file.path.startswith(APT_FILES) or file.path == airgap.SOURCES
    ]
    if sources:
        yield Script(*inline("apply.py"), order=_order(sources))
    if plan.spec.settings.air_gapped is not None:
        yield _from_bundle(plan.missing_packages, plan.apt_list)
        return
    proxy = plan.spec.settings.proxy
    exports = "".join(
        f"export {name}={shlex.quote(value)}; "
        for name, value in (
            ("http_proxy", proxy.http),
            ("https_proxy", proxy.https),
            ("no_proxy", proxy.no_proxy),
        )
        if value
    )
    install = f"{APT} -y --no-install-recommends install {' '.join(plan.missing_packages)}"
    # The lists are read anew only where they are too old or absent: hosts without a way out
    # would wait for a mirror that they do not need.
    yield Command(f"{exports}{install} || {{ {APT} update && {install}; }}")


def _from_bundle(packages: Sequence[str], listed: str) -> Command:
    """apt with the bundle as its only source, and lists of its own; the host's stay as they are.

    No proxy, and no look at the date of the lists: clocks of such hosts go as they please. No
    signature either: the list must have the checksum that the operator has, and apt compares
    every package with the list.
    """
    state = airgap.APT_STATE
    options = {
        "Dir::Etc::SourceList": airgap.SOURCES,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": f"{state}/lists",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Acquire::http::Proxy": "DIRECT",
        "Acquire::Check-Date": "false",
        "Acquire::GzipIndexes": "false",  # a checksum of the plain list is looked at
        "Acquire::Languages": "none",
    }
    words = " ".join(f"-o {name}={shlex.quote(value)}" for name, value in options.items())
    apt = f"{APT} {words}"
    told = (
        "the Debian packages that the bundle's host serves are not those of locks/apt-*.txt: "
        "carry the bundle that was made with that file; nothing was installed"
    )
    return Command(
        f"mkdir -p {state}/lists/partial && {apt} update && "
        f"{{ cat {state}/lists/*_Packages | sha256sum | grep -q '^{listed} ' || "
        f'{{ echo "{told}" >&2; false; }}; }} && '
        f"{apt} -y --no-install-recommends install {' '.join(packages)}"
    )


@operation()
def bundle(plan: HostPlan) -> Generator[Command, None, None]:
    """Have the bundle for hosts without internet on its host, verified and served."""
    if plan.bundle is None or (plan.bundle.held and not plan.due(plan.bundle_services)):
        host.noop("the bundle is there and served")
        return
    own = {f"{paths.LIB}/{name}" for name in airgap.SCRIPTS} | {airgap.SETTINGS, airgap.UNIT_FILE}
    if changed := [file for file in plan.changed_files if file.path in own]:
        yield Script(*inline("apply.py"), order=_order(changed))
    if not plan.bundle.held:
        yield Script(*installed("bundle.py"), "take", "--settings", "-", order=plan.bundle.order)
    yield from map(Command, plan.due(plan.bundle_services))


@operation()
def files(plan: HostPlan, keep_removed: bool = True) -> Generator[Command, None, None]:
    """
    Put the files that differ, in one command, and check them before they stay.

    + keep_removed: leave the files that are no longer wanted: something still uses them
    """
    changed = plan.changed_files if keep_removed else ()
    removed = () if keep_removed else plan.removed_files
    if not changed and not removed:
        host.noop("every file is as wanted")
        return
    yield Script(*inline("apply.py"), order=_order(changed, removed))


def _order(files: Sequence[ManagedFile], remove: Sequence[str] = ()) -> dict[str, object]:
    """What onhost/apply.py is told."""
    return {
        "files": [
            {
                "path": file.path,
                "content": file.content,
                "mode": oct(file.mode)[2:],
                "owner": file.owner,
                "group": file.group,
            }
            for file in files
        ],
        "remove": list(remove),
        "checks": [
            {"paths": list(where), "command": list(command), "remedy": remedy}
            for where, command, remedy in CHECKS
        ],
    }


@operation()
def services(plan: HostPlan, services: tuple[Service, ...]) -> Generator[Command, None, None]:
    """Run and enable the daemons around vLLM, with the files they must have read."""
    if not plan.due(services):
        host.noop("every service runs with its present files")
    yield from map(Command, plan.due(services))
