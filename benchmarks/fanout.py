"""Weights to many hosts: from host to host against N direct downloads and rsync from one host.

    sudo python benchmarks/fanout.py [--hosts 8] [--mib 1024] [--files 16] [--mbit 240]

Each host is a network namespace on one bridge whose link is rate-limited in both directions (tc),
as the origin's is; on all of them runs what runs on real hosts (vllm_fleet/onhost/weights.py,
with the modelscope library) against the test bed's hub. Bounds: all hosts are done within 1.75
times what one host alone takes, and the origin sends each byte at most 1.2 times. The last line
is one JSON object. Root; everything made is removed again. rsync is compared where installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.testbed import hub  # noqa: E402
from tests.testbed.shell import BedError, run, until  # noqa: E402

SCRIPT = HERE.parent / "vllm_fleet/onhost/weights.py"
FABRIC, NET, PORT = "fanb", "10.79.0", 8997
TIME_BOUND, BYTES_BOUND = 1.75, 1.2
REPO, ORIGIN = "Bench/model", f"{NET}.1"


@dataclass
class Outcome:
    """One way, measured."""

    way: str
    seconds: float
    origin_share: float  # bytes that the origin sent, in copies of the model


def address(number: int) -> str:
    """Of a host, counted from 0."""
    return f"{NET}.{10 + number}"


def make_model(place: Path, mib: int, files: int) -> None:
    """A repository of random shards whose headers are right."""
    place.mkdir(parents=True)
    config = {"architectures": ["Qwen3ForCausalLM"]}
    (place / "config.json").write_text(json.dumps(config))
    each = (mib << 20) // files
    for number in range(1, files + 1):
        tensor = {"dtype": "U8", "shape": [each], "data_offsets": [0, each]}
        header = json.dumps({f"t{number}": tensor}).encode()
        with (place / f"model-{number:05}-of-{files:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            left = each
            while left:
                block = min(left, 1 << 20)
                file.write(os.urandom(block))
                left -= block


@contextmanager
def network(hosts: int, mbit: int) -> Iterator[None]:
    """A bridge, the origin and the hosts, each link limited to ``mbit`` in each direction."""
    names = [FABRIC, f"{FABRIC}-o", *(f"{FABRIC}-{n}" for n in range(hosts))]
    try:
        for name in names:
            run(["ip", "netns", "add", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
        run(["ip", "-n", FABRIC, "link", "add", "br0", "type", "bridge"])
        run(["ip", "-n", FABRIC, "link", "set", "br0", "up"])
        for number, name in enumerate(names[1:]):
            own = ORIGIN if number == 0 else address(number - 1)
            here = f"v{number}"
            run(["ip", "-n", FABRIC, "link", "add", here, "type", "veth", "peer", "name", "eth0",
                 "netns", name])  # fmt: skip
            run(["ip", "-n", FABRIC, "link", "set", here, "master", "br0", "up"])
            run(["ip", "-n", name, "addr", "add", f"{own}/24", "dev", "eth0"])
            run(["ip", "-n", name, "link", "set", "eth0", "up"])
            for space, device in ((FABRIC, here), (name, "eth0")):
                limit = ["tbf", "rate", f"{mbit}mbit", "burst", "512kb", "latency", "100ms"]
                run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", *limit])
        yield
    finally:
        for name in names:
            run(["ip", "netns", "del", name], check=False)


@contextmanager
def process(space: str, argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a namespace, ended at the end."""
    with log.open("ab") as out:
        child = subprocess.Popen(
            ["ip", "netns", "exec", space, *argv], cwd=HERE.parent, stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
        )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


def fetch(root: Path, number: int, sharing: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the download of one host; with other hosts where there are several."""
    home = root / f"h{number}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    final = home / "models/bench/master"
    settings: dict[str, object] = {
        "name": "bench", "source": "modelscope", "repo": REPO, "revision": "master",
        "directory": str(final), "stamp": str(final / ".verified.json"), "needs": [],
        "endpoint": f"http://{ORIGIN}:9000", "state": str(home / "state"),
    }  # fmt: skip
    if len(sharing) > 1:
        hosts = [address(one) for one in sharing]
        me = address(number)
        settings["fanout"] = {"me": me, "port": PORT, "peers": hosts, "fetchers": hosts}
    (home / "settings.json").write_text(json.dumps(settings))
    argv = [sys.executable, str(SCRIPT), "fetch", "--settings", str(home / "settings.json")]
    with (home / "log").open("wb") as out:
        return subprocess.Popen(
            ["ip", "netns", "exec", f"{FABRIC}-{number}", *argv], stdout=out, stderr=out,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip


def download(root: Path, hosts: int, *, sharing: bool) -> float:
    """Seconds until all hosts have the model switched in."""
    began = time.monotonic()
    running = [fetch(root, n, range(hosts) if sharing else [n]) for n in range(hosts)]
    finals = [root / f"h{n}/models/bench/master" for n in range(hosts)]
    try:
        # Not when the processes end: a host that is done goes on serving the others.
        while not all(final.is_dir() for final in finals):
            for number, one in enumerate(running):
                if one.poll() not in (None, 0):
                    raise BedError((root / f"h{number}/log").read_text()[-2000:])
            time.sleep(0.05)
        seconds = time.monotonic() - began
        for one in running:
            one.wait(60)
        return seconds
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
                one.wait()


def rsync(root: Path, hosts: int) -> float:
    """One host downloads, the others copy from it at once by rsync."""
    began = time.monotonic()
    download(root, 1, sharing=False)
    source = root / "h0/models/bench/master"
    config = root / "rsyncd.conf"
    config.write_text(f"use chroot = no\nuid = 0\ngid = 0\n[m]\npath = {source}\nread only = yes\n")
    daemon = ["rsync", "--daemon", "--no-detach", f"--config={config}", f"--address={address(0)}"]
    with process(f"{FABRIC}-0", daemon, root / "rsync.log"):
        time.sleep(0.5)
        copies = []
        for number in range(1, hosts):
            target = root / f"r{number}"
            shutil.rmtree(target, ignore_errors=True)
            argv = ["rsync", "-a", "-W", f"rsync://{address(0)}/m/", str(target)]
            argv = ["ip", "netns", "exec", f"{FABRIC}-{number}", *argv]
            copies.append(subprocess.Popen(argv))
        for copy in copies:
            if copy.wait():
                raise BedError("rsync failed")
    seconds = time.monotonic() - began
    for number in range(1, hosts):
        shutil.rmtree(root / f"r{number}", ignore_errors=True)
    return seconds


def main() -> int:
    """Run the comparison; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--mbit", type=int, default=240, help="of each link, in each direction")
    parser.add_argument(
        "--folder",
        help="where all hosts keep their files, such as /dev/shm where one disk is slower than "
        "all links together",
    )
    parser.add_argument("--no-direct", action="store_true", help="leave N direct downloads out")
    parser.add_argument("--no-rsync", action="store_true", help="leave rsync out")
    options = parser.parse_args()
    with_rsync = shutil.which("rsync") is not None and not options.no_rsync
    root = Path(tempfile.mkdtemp(prefix="fanout-", dir=options.folder))
    outcomes: list[Outcome] = []
    try:
        make_model(root / "hub" / REPO, options.mib, options.files)
        size = sum(path.stat().st_size for path in (root / "hub" / REPO).iterdir())
        serving = [sys.executable, "-m", "tests.testbed.hub", "--root", str(root / "hub")]
        serving += ["--listen", f"{ORIGIN}:9000"]
        log = root / "hub/requests.jsonl"
        with network(options.hosts, options.mbit), process(f"{FABRIC}-o", serving, root / "log"):
            if not until(lambda: "serving" in (root / "log").read_text(), 10):
                raise BedError((root / "log").read_text())
            listing = f"http://{ORIGIN}:9000/api/v1/models/{REPO}/repo/files?Revision=master"
            ask = f"import urllib.request; urllib.request.urlopen({listing!r}, timeout=300).read()"
            # Once, so that the hub has hashed its files before anything is timed.
            run(["ip", "netns", "exec", f"{FABRIC}-0", sys.executable, "-c", ask], timeout=300)

            def measure(way: str, seconds: float) -> None:
                sent = sum(entry["bytes"] for entry in hub.requests(root / "hub") if entry["file"])
                log.unlink()
                for home in root.glob("h[0-9]*"):
                    shutil.rmtree(home)
                outcomes.append(Outcome(way, seconds, sent / size))
                print(f"{way:28} {seconds:7.1f} s   origin sent {sent / size:5.2f} x", flush=True)

            log.unlink()
            measure("one host", download(root, 1, sharing=False))
            measure("fan-out", download(root, options.hosts, sharing=True))
            if with_rsync:
                measure("one host, then rsync", rsync(root, options.hosts))
            if not options.no_direct:
                measure("direct, all at once", download(root, options.hosts, sharing=False))
    except BedError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    by_way = {one.way: one for one in outcomes}
    ratio = by_way["fan-out"].seconds / by_way["one host"].seconds
    share = by_way["fan-out"].origin_share
    met = ratio <= TIME_BOUND and share <= BYTES_BOUND
    if not with_rsync:
        print("rsync is not compared: left out, or not installed here")
    print(
        json.dumps(
            {
                "hosts": options.hosts, "mib": options.mib, "files": options.files,
                "mbit": options.mbit, "ratio": round(ratio, 3), "origin_share": round(share, 3),
                "seconds": {one.way: round(one.seconds, 1) for one in outcomes}, "met": met,
            }
        )
    )  # fmt: skip
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
