"""One test host: made, booted, reached, broken and removed."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.testbed.fabric import BRIDGE, Fabric
from tests.testbed.shell import BedError, run, until

OPS_USER = "ops"
OPS_PASSWORD = "demo-sudo"
# openssl passwd -6 of the above
_OPS_HASH = (
    "$6$bedsalt$"
    "DDKsCOXw2FFhRGcRDUIaiRFbAzBrFn2VbARurY2/SMADYpeGzE3/tRZvuqp2.Qrp46ZTCLFXZWJkdDSAekSBq0"
)
PACKAGE_CACHE = "/var/cache/vllm-fleet"  # on a host; outlives it, for the next of its name
_MAX_NAME = 12  # its link vb-NAME must fit the kernel's 15 characters

# $1 folder of the host, $2 base, $3 cgroup (relative), $4 name, then arguments of nspawn.
# - A private mount namespace: all mounts end with the host's last process.
# - nspawn cleans up after itself only when /run/systemd/nspawn is a tmpfs.
# - cgroup2 alone is mounted, so that the host is pure v2 whatever the outer machine is.
# - An own cgroup, else all hosts would share one, and none could be frozen or killed alone.
# - 133 is how nspawn says that the host asked for a reboot (with --keep-unit).
# - adjtimex: the node exporter reads the clock's state; without CAP_SYS_TIME nobody sets it.
_BOOT = r"""
dir=$1 base=$2 cgroup=$3 name=$4; shift 4
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
! mountpoint -q /sys/fs/cgroup || umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo $$ >"/sys/fs/cgroup/$cgroup/cgroup.procs"
mount -t overlay overlay -o "lowerdir=$base,upperdir=$dir/u,workdir=$dir/w" "$dir/m" || exit 98
while :; do
    rc=0
    systemd-nspawn -q -D "$dir/m" --machine="$name" --boot --keep-unit --register=no \
        --resolv-conf=off --timezone=off --link-journal=no --console=read-only \
        --system-call-filter="adjtimex clock_adjtime" "$@" || rc=$?
    echo "nspawn ended: $rc"
    [ "$rc" = 133 ] || exit "$rc"
done
"""


@dataclass(frozen=True)
class HostSpec:
    """What a host is to be. ``last`` is the last part of its address, ``binds`` outer: inner."""

    name: str
    last: int
    user: str = "root"  # whom a deploy connects as: root or ops
    binds: tuple[tuple[str, str], ...] = field(default=())


@dataclass(frozen=True)
class Host:
    """A host of a bed."""

    spec: HostSpec
    fabric: Fabric
    root: Path  # the bed's folder
    base: Path
    kept: Path  # where package caches wait for the next host of a name
    cgroups: Path  # folder of the bed's cgroups
    resolv_conf: str

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def address(self) -> str:
        return self.fabric.net.host(self.spec.last)

    @property
    def dir(self) -> Path:
        return self.root / "hosts" / self.name

    @property
    def cgroup(self) -> Path:
        return self.cgroups / self.name

    @property
    def console(self) -> str:
        """What the host wrote on its console."""
        file = self.dir / "console.log"
        return file.read_text(errors="replace") if file.exists() else ""

    # --- life ---

    def create(self) -> None:
        """Lay out the host's own files over the base: names, address, keys, users."""
        if len(self.name) > _MAX_NAME:
            raise BedError(f"host name {self.name!r} is longer than {_MAX_NAME} characters")
        for part in ("u", "w", "m"):
            (self.dir / part).mkdir(parents=True, exist_ok=True)
        net = self.fabric.net
        self.put("/etc/hostname", f"{self.name}\n")
        self.put("/etc/hosts", f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        self.put("/etc/machine-id", hashlib.md5(self.name.encode()).hexdigest() + "\n")
        self.put("/etc/resolv.conf", self.resolv_conf)
        self.put(
            "/etc/systemd/network/10-host0.network",
            f"[Match]\nName=host0\n[Network]\nAddress={self.address}/24\n"
            f"Gateway={net.fabric}\nLinkLocalAddressing=no\n",
        )
        # pip takes wheels by plain HTTP only from hosts that its configuration trusts
        self.put("/etc/pip.conf", f"[global]\ntrusted-host = {net.fabric}\n")
        # fresh package lists, as far as apt's users can tell: no update is due
        self.put("/var/lib/apt/periodic/update-success-stamp", "")
        key = (self.root / "id_ed25519.pub").read_text()
        self.put("/root/.ssh/authorized_keys", key, 0o600)
        os.chmod(self.dir / "u/root/.ssh", 0o700)
        os.chmod(self.dir / "u/root", 0o700)
        if self.spec.user == OPS_USER:
            self._add_ops(key)
        self._host_key()
        waiting, cache = self.kept / self.name, self.dir / "u" / PACKAGE_CACHE.lstrip("/")
        if waiting.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(waiting, cache)

    def _add_ops(self, key: str) -> None:
        """A user with sudo by password; root may not log in, so that missing sudo shows."""
        etc = self.base / "etc"
        add = {
            "passwd": f"{OPS_USER}:x:1000:1000::/home/{OPS_USER}:/bin/bash\n",
            "shadow": f"{OPS_USER}:{_OPS_HASH}:19000:0:99999:7:::\n",
            "group": f"{OPS_USER}:x:1000:\n",
            "gshadow": f"{OPS_USER}:!::\n",
        }
        for name, line in add.items():
            mode = 0o640 if "shadow" in name else 0o644
            self.put(f"/etc/{name}", (etc / name).read_text() + line, mode)
            shutil.chown(self.dir / "u/etc" / name, 0, (etc / name).stat().st_gid)
        self.put("/etc/sudoers.d/ops", f"{OPS_USER} ALL=(ALL:ALL) ALL\n", 0o440)
        self.put("/etc/ssh/sshd_config.d/20-host.conf", "PermitRootLogin no\n")
        self.put(f"/home/{OPS_USER}/.ssh/authorized_keys", key, 0o600)
        home = self.dir / "u/home" / OPS_USER
        os.chmod(home / ".ssh", 0o700)
        for path in (home, *home.rglob("*")):
            os.chown(path, 1000, 1000)

    def _host_key(self) -> None:
        """A host key made beforehand, and its line in known_hosts instead of any older one."""
        key = self.dir / "u/etc/ssh/ssh_host_ed25519_key"
        if not key.exists():
            key.parent.mkdir(parents=True, exist_ok=True)
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(key)])
        public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        known = self.root / "known_hosts"
        lines = known.read_text().splitlines() if known.exists() else []
        kept = [line for line in lines if line.split()[:1] != [self.address]]
        known.write_text("\n".join([*kept, f"{self.address} {public}"]) + "\n")

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file into the host's own layer; only before it is booted."""
        file = self.dir / "u" / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        os.chmod(file, mode)

    def running(self) -> bool:
        """Whether any process of the host lives."""
        events = self.cgroup / "cgroup.events"
        return events.exists() and "populated 1" in events.read_text()

    def boot(self) -> None:
        """Start it, without waiting; nothing when it runs."""
        if self.running():
            return
        self.cgroup.mkdir(parents=True, exist_ok=True)
        arguments = [f"--network-bridge={BRIDGE}"]
        for source, target in self.spec.binds:
            Path(source).mkdir(parents=True, exist_ok=True)
            arguments.append(f"--bind={source}:{target}")
        private = ("unshare", "--mount", "--propagation", "private")
        relative = f"{self.cgroups.name}/{self.name}"
        script = ["bash", "-eu", "-c", _BOOT, "bed", str(self.dir), str(self.base), relative]
        with (self.dir / "console.log").open("ab") as console:
            subprocess.Popen(
                [*self.fabric.inside(*private), *script, self.name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        if not until(self.running, 10):
            raise BedError(f"{self.name}: did not start; its console:\n{self._tail()}")

    def wait(self, seconds: float = 60, not_boot: str = "") -> None:
        """Wait until it answers SSH, from another boot than ``not_boot`` where given."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.running():
                raise BedError(f"{self.name}: ended while booting; its console:\n{self._tail()}")
            seen = self._ssh("cat /proc/sys/kernel/random/boot_id", timeout=5)
            if seen is not None and seen.returncode == 0 and seen.stdout.strip() != not_boot:
                return
            time.sleep(0.1)
        raise BedError(f"{self.name}: no answer by SSH in {seconds:.0f} s:\n{self._tail()}")

    def destroy(self) -> None:
        """Kill it and delete everything it wrote, except its package cache."""
        self.powercut()
        remove_cgroup(self.cgroup)
        remove_files(self.dir, self.kept)

    # --- use ---

    def sh(
        self, command: str, check: bool = True, timeout: float = 120, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command as root on the host, over SSH (and sudo where that is the way).

        :raises BedError: it failed (with ``check``), or there was no end in time.
        """
        if self.spec.user == OPS_USER:
            # -k: ask for the password even where one was given lately, for it is sent anyway
            wrapped = f"sudo -k -S -p '' -- bash -c {shlex.quote(command)}"
            done = self._ssh(wrapped, timeout, f"{OPS_PASSWORD}\n{stdin}")
        else:
            done = self._ssh(command, timeout, stdin)
        if done is None:
            raise BedError(f"{self.name}: no end after {timeout:.0f} s: {command}")
        if check and done.returncode:
            tail = (done.stdout + done.stderr).strip()[-2000:]
            raise BedError(f"{self.name}: exit {done.returncode}: {command}\n{tail}")
        return done

    def ssh_argv(self) -> list[str]:
        """The ssh command line that reaches it from the outer machine."""
        options = [
            f"UserKnownHostsFile={self.root / 'known_hosts'}",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            "BatchMode=yes",
            "ConnectTimeout=3",
        ]
        argv = ["ssh", "-q", "-F", "/dev/null", "-i", str(self.root / "id_ed25519")]
        for option in options:
            argv += ["-o", option]
        return [*argv, f"{self.spec.user}@{self.address}"]

    def _ssh(
        self, command: str, timeout: float, stdin: str = ""
    ) -> subprocess.CompletedProcess[str] | None:
        try:
            return subprocess.run(
                [*self.ssh_argv(), command],
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None

    # --- faults ---

    def powercut(self) -> None:
        """Kill every process at once; files stay as they were written."""
        if not self.cgroup.exists():
            return
        (self.cgroup / "cgroup.kill").write_text("1")
        if not until(lambda: not self.running(), 20):
            raise BedError(f"{self.name}: processes survive in {self.cgroup}")

    def reboot(self, seconds: float = 90) -> None:
        """Reboot it from inside and wait until the new boot answers."""
        before = self.sh("cat /proc/sys/kernel/random/boot_id").stdout.strip()
        self.sh("systemctl reboot", check=False)  # the connection may die first
        self.wait(seconds, not_boot=before)

    def freeze(self) -> None:
        """Stop its time: it keeps its connections and answers nothing."""
        (self.cgroup / "cgroup.freeze").write_text("1")
        events = self.cgroup / "cgroup.events"
        if not until(lambda: "frozen 1" in events.read_text(), 10):
            raise BedError(f"{self.name}: does not freeze")

    def thaw(self) -> None:
        """Let it go on."""
        (self.cgroup / "cgroup.freeze").write_text("0")

    def cut(self) -> None:
        """Pull its network cable."""
        run(["ip", "-n", self.fabric.tag, "link", "set", f"vb-{self.name}", "down"])

    def mend(self) -> None:
        """Plug the cable in again."""
        run(["ip", "-n", self.fabric.tag, "link", "set", f"vb-{self.name}", "up"])

    def _tail(self) -> str:
        return "\n".join(self.console.splitlines()[-15:]) or "(nothing)"


def remove_files(folder: Path, kept: Path) -> None:
    """Delete the folder of a host that is off; its package cache is kept where none is yet.

    The cache lies in the host's own layer and not on a mount of its own, so that packages are
    installed from it by hard links, as on a real host.
    """
    if not folder.exists():
        return
    cache = folder / "u" / PACKAGE_CACHE.lstrip("/")
    if cache.exists() and not (kept / folder.name).exists():
        kept.mkdir(parents=True, exist_ok=True)
        shutil.move(cache, kept / folder.name)
    shutil.rmtree(folder)


def remove_cgroup(cgroup: Path) -> None:
    """Kill what runs in a cgroup and remove it with all below it."""
    if not cgroup.exists():
        return
    (cgroup / "cgroup.kill").write_text("1")
    events = cgroup / "cgroup.events"
    if not until(lambda: "populated 0" in events.read_text(), 20):
        raise BedError(f"processes survive in {cgroup}")
    for folder, _, _ in os.walk(cgroup, topdown=False):
        Path(folder).rmdir()
