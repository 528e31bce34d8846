"""The test bed by hand: hosts of this machine that are made, booted, reached and broken."""

from __future__ import annotations

import argparse
import sys
import time

from tests.testbed.bed import SERVICES, Bed, demo_hosts
from tests.testbed.shell import BedError

_ONE_HOST = {
    "cut": "pull the host's network cable",
    "mend": "plug it in again",
    "freeze": "stop the host's time: it hangs, and keeps its connections",
    "thaw": "let it go on",
    "powercut": "kill everything on the host at once",
    "boot": "start a host that is off, and wait for it",
    "reboot": "reboot a host, and wait for it",
}


def main() -> int:
    """Run one command; 0 good, 1 failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make and boot the three hosts of the demo")
    up.add_argument("--no-uplink", action="store_true", help="hosts reach nothing outside")
    up.add_argument("--no-services", action="store_true", help="neither hub nor wheels")
    commands.add_parser("down", help="remove hosts and network, restore settings; keep caches")
    commands.add_parser("destroy", help="down, and delete the caches too")
    commands.add_parser("status", help="what stands")
    sh = commands.add_parser("sh", help="run a shell command as root on a host")
    sh.add_argument("name")
    sh.add_argument("cmd")
    for name, text in _ONE_HOST.items():
        commands.add_parser(name, help=text).add_argument("name")
    arguments = parser.parse_args()
    try:
        return _do(arguments)
    except BedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


def _do(arguments: argparse.Namespace) -> int:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    bed = Bed(say=say)
    command = arguments.command
    if command == "up":
        serve = () if arguments.no_services else tuple(SERVICES)
        bed.up(demo_hosts(), serve, uplink=not arguments.no_uplink)
    elif command in ("down", "destroy"):
        bed.down() if command == "down" else bed.destroy()
        say("the bed is down")
    elif command == "status":
        print("\n".join(bed.status()))
    elif command == "sh":
        done = bed.host(arguments.name).sh(arguments.cmd, check=False)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        return done.returncode
    else:
        host = bed.host(arguments.name)
        getattr(host, command)()
        if command == "boot":
            host.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
