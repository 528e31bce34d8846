"""ExecStartPre (and, with --after-stop, ExecStopPost) of an instance, run as root.

Refuses a start that cannot go well and says what stands in its way: a port or a card that
another process holds, a card that is lost or has another index than planned, a release or
weights that are not there. Then makes the token of this start and writes down the checksum
of what is started.

Environment: FLEET_INSTANCE, FLEET_HOST, FLEET_DEVICE, FLEET_CARDS, FLEET_CARD_UUIDS,
FLEET_PORT, FLEET_RELEASE, FLEET_WEIGHTS, FLEET_RUN, FLEET_STATE, FLEET_USER, FLEET_CHECKSUM;
of a rank of a span FLEET_RANK, and FLEET_SPAN_PORTS (setting=port,... that it listens at).
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import secrets
import socket
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence

PORT_SECONDS = 10.0  # a server that was just killed frees its port at once, or nearly so
MEMORY_SECONDS = 60.0  # memory of a card comes back some time after its process has gone
NVIDIA_SMI_SECONDS = 60.0  # it hangs on a card that fell off the bus


class Refused(Exception):
    """Why this start must not go on: what, where, and what to do."""


class Process(NamedTuple):
    """A process that holds something an instance needs."""

    pid: int
    user: str
    command: str

    def __str__(self) -> str:
        return "pid %d of %s: %s" % self


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Check before a start, or wait after a stop; the exit code."""
    where = "%s, instance %s" % (env["FLEET_HOST"], env["FLEET_INSTANCE"])
    uuids = [uuid for uuid in env.get("FLEET_CARD_UUIDS", "").split(",") if uuid]
    device = env["FLEET_DEVICE"]
    try:
        if "--after-stop" in arguments:
            if device == "cuda":
                check_cards_free(uuids)
            return 0
        clean(env["FLEET_RUN"])
        user = pwd.getpwnam(env["FLEET_USER"])
        check_whole(env["FLEET_STATE"], env["FLEET_INSTANCE"])
        check_paths(env["FLEET_RELEASE"], env["FLEET_WEIGHTS"])
        check_readable(env["FLEET_WEIGHTS"], user)
        check_adapters(json.loads(env.get("FLEET_ADAPTERS", "[]")), user)
        if int(env.get("FLEET_RANK") or 0) == 0:
            check_port(int(env["FLEET_PORT"]))
        for one in filter(None, env.get("FLEET_SPAN_PORTS", "").split(",")):
            setting, _, port = one.partition("=")
            check_port(int(port), setting="span.%s" % setting)
        if device == "cuda":
            check_cards([int(i) for i in env["FLEET_CARDS"].split(",") if i], uuids)
            check_cards_free(uuids)
        elif device == "rocm":
            check_rocm_nodes()
        # last of all: from here on the process counts as started with this
        write(os.path.join(env["FLEET_RUN"], "token"), secrets.token_hex(32), user, 0o600)
        write(os.path.join(env["FLEET_STATE"], "running"), env["FLEET_CHECKSUM"], user, 0o644)
    except Refused as refusal:
        print("before_start: %s: %s" % (where, refusal), file=sys.stderr, flush=True)
        return 1
    return 0


def clean(run: str) -> None:
    """Nothing of an earlier start may speak for this one."""
    for name in os.listdir(run):
        ours = ("ready", "wedged", "token", "span.json", "leaving", "drained")
        if name in ours or name.startswith("in-flight."):
            os.unlink(os.path.join(run, name))


def check_whole(state: str, name: str) -> None:
    """Raises Refused where a change of this instance's files ended half way (power loss)."""
    if os.path.exists("%s/_rollout/instances/%s.swapping" % (os.path.dirname(state), name)):
        raise Refused(
            "its files were being changed when this host went down, and may be mixed; run "
            "upgrade.py again (it goes on where it was), or rollback.py"
        )


def check_paths(release: str, weights: str) -> None:
    """Raises Refused where the release or the weights are missing: vLLM's own words mislead."""
    program = os.path.join(release, "bin", "vllm")
    if not os.access(program, os.X_OK):
        raise Refused(
            "%s is missing or cannot be run: the release is not installed; deploy this host again"
            % program
        )
    if not os.path.isfile(os.path.join(weights, "config.json")):
        raise Refused(
            "%s has no config.json: the weights are not there; deploy this host again, "
            "or correct `repo` where `source` is path" % weights
        )


def check_adapters(adapters: Sequence[str], user: "pwd.struct_passwd") -> None:
    """Raises Refused where a LoRA adapter is missing: vLLM tells so only after the weights."""
    for path in adapters:
        if not os.path.isfile(os.path.join(path, "adapter_config.json")):
            raise Refused(
                "%s has no adapter_config.json: put the LoRA adapter there, or correct its `path` "
                "in `adapters` of the model" % path
            )
        check_readable(path, user)


def check_readable(weights: str, user: "pwd.struct_passwd") -> None:
    """Raises Refused, naming the file, where the instance's user cannot read its weights."""
    find = ["find", "-L", weights, "-maxdepth", "2", "!", "-readable", "-print", "-quit"]
    drop: Dict[str, Any] = {}
    if os.getuid() == 0:
        drop = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    done = subprocess.run(
        find,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        env=dict(os.environ, LC_ALL="C"),
        **drop,
    )
    if done.stdout or done.returncode:
        # A path; where a folder above it is closed, find's own complaint.
        found = done.stdout.strip()
        found = found[len("find: ") :] if found.startswith("find: ") else found
        raise Refused(
            "the user %s cannot read %s; run `chmod -R a+rX` on the weights and on the folders "
            "above them" % (user.pw_name, found[:300] or weights)
        )


def check_port(port: int, seconds: float = PORT_SECONDS, setting: str = "port") -> None:
    """Raises Refused, naming who listens there, where the port is not free in time."""
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
                probe.listen(1)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise Refused("port %d cannot be used: %s" % (port, error)) from error
        if time.monotonic() >= deadline:
            holders = [str(process) for process in listeners(port)] or ["a process not visible"]
            raise Refused(
                "port %d is held by %s; stop it, or give the instance another `%s`"
                % (port, "; ".join(holders), setting)
            )
        time.sleep(0.2)


def listeners(port: int) -> List[Process]:
    """The processes that listen on a TCP port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        inodes |= {
            "socket:[%s]" % row[9]
            for row in rows
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
        }
    return [describe(pid) for pid in pids() if inodes and holds(pid, inodes)]


def pids() -> Iterator[int]:
    """Every process there is."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def holds(pid: int, targets: "set[str]") -> bool:
    """Whether a process has one of these open."""
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(os.path.join(folder, name)) in targets:
                return True
        except OSError:
            continue
    return False


def describe(pid: int) -> Process:
    """Who a process is. Its arguments may hold secrets: program and first arguments alone."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read().decode(errors="replace").split("\0")[:3]
    except OSError:
        return Process(pid, "?", "(gone)")
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = "uid %d" % uid
    return Process(pid, user, " ".join(words).strip()[:120] or "(kernel)")


def check_cards(cards: Sequence[int], uuids: Sequence[str]) -> None:
    """Raises Refused where a card is lost or not the one planned at its index."""
    present = card_uuids()
    if not os.path.exists("/dev/nvidia-uvm"):
        raise Refused(
            "/dev/nvidia-uvm is missing, CUDA would see no card; run `nvidia-modprobe -u -c 0` "
            "(unit vllm-device-nodes.service) and look for the driver's errors in `dmesg`"
        )
    if len(cards) != len(uuids):
        raise Refused("has %d cards but %d UUIDs; deploy again" % (len(cards), len(uuids)))
    for card, uuid in zip(cards, uuids, strict=True):
        found = present.get(card)
        if found == uuid:
            continue
        elsewhere = [index for index, other in present.items() if other == uuid]
        if elsewhere:
            raise Refused(
                "card %d was planned as %s, which now has index %d: a card was lost, added or "
                "moved; check `nvidia-smi -L`, then deploy again" % (card, uuid, elsewhere[0])
            )
        raise Refused(
            "card %d (%s) is gone; nvidia-smi shows %s at this index. Look for `NVRM: Xid` in "
            "`dmesg`, reset or replace the card; or take it out of `cards` and deploy"
            % (card, uuid, found or "nothing")
        )


def check_cards_free(uuids: Sequence[str], seconds: float = MEMORY_SECONDS) -> None:
    """Raises Refused, naming each process that computes on these cards, where they stay taken."""
    deadline = time.monotonic() + seconds
    while True:
        taken = [(pid, uuid, used) for pid, uuid, used in compute_processes() if uuid in uuids]
        if not taken:
            return
        if time.monotonic() >= deadline:
            named = "; ".join(
                "%s holds %s by %s" % (uuid, used, describe(pid)) for pid, uuid, used in taken
            )
            raise Refused(
                "its cards are not free: %s. End these processes, or choose other `cards`" % named
            )
        time.sleep(1)


def check_rocm_nodes() -> None:
    """Raises Refused where the driver has made no device nodes."""
    for node in ("/dev/kfd", "/dev/dri"):
        if not os.path.exists(node):
            raise Refused("%s is missing: the amdgpu driver is not loaded; see `dmesg`" % node)


def card_uuids() -> Dict[int, str]:
    """UUID by index, as nvidia-smi numbers the cards now."""
    return {int(index): uuid for index, uuid in nvidia_smi("--query-gpu=index,uuid", 2)}


def compute_processes() -> List["tuple[int, str, str]"]:
    """(pid, UUID of the card, memory as text) of each process that computes on a card."""
    rows = nvidia_smi("--query-compute-apps=pid,gpu_uuid,used_memory", 3)
    return [(int(pid), uuid, used) for pid, uuid, used in rows if pid.isdigit()]


def nvidia_smi(query: str, columns: int) -> List[List[str]]:
    """The rows of a query. Raises Refused where nvidia-smi is missing, fails or hangs."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            timeout=NVIDIA_SMI_SECONDS,
        )
    except FileNotFoundError:
        raise Refused("nvidia-smi is not installed: no NVIDIA driver on this host") from None
    except subprocess.TimeoutExpired:
        raise Refused(
            "nvidia-smi does not answer within %.0f s: a card hangs; see `NVRM: Xid` in `dmesg`, "
            "then reboot" % NVIDIA_SMI_SECONDS
        ) from None
    if done.returncode:
        raise Refused("`%s` failed: %s" % (" ".join(command), done.stdout.strip()[:400]))
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns]


def write(path: str, text: str, user: "pwd.struct_passwd", mode: int) -> None:
    """Put a file in place at once, owned by the user.

    The folder belongs to that user: a new name is made and moved, so that no link planted
    there can lead a write by root elsewhere.
    """
    temporary = "%s.%s" % (path, secrets.token_hex(4))
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        os.write(file, text.encode() + b"\n")
        os.fchmod(file, mode)
        os.fchown(file, user.pw_uid, user.pw_gid)
    finally:
        os.close(file)
    os.rename(temporary, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
