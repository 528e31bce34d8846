"""Running commands of the outer machine, with an error that says what failed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence


class BedError(Exception):
    """Something of the test bed failed; the text says what, where and what to do."""


def run(
    argv: Sequence[str],
    check: bool = True,
    timeout: float = 60,
    stdin: str | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return it with its output.

    :raises BedError: it failed (with ``check``) or did not end within ``timeout`` seconds.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise BedError(f"no end after {timeout:.0f} s: {' '.join(argv)}") from None
    except FileNotFoundError:
        raise BedError(f"{argv[0]}: no such command on this machine") from None
    if check and done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BedError(f"exit {done.returncode}: {' '.join(argv)}\n{tail}")
    return done


def until(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Wait until a condition holds, at most so many seconds; whether it did."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True
