"""One operator at a time: the lock on one host of the fleet, and the sign of life of its holder."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from vllm_fleet.rollout.hosts import Failed, Hosts
from vllm_fleet.spec.model import Fleet

BEAT_SECONDS = 15.0
STALE_SECONDS = 120


class Locked(Exception):
    """Somebody else changes this fleet, or takes the lock away; says who, and what to do."""


@dataclass(frozen=True)
class Holder:
    """A run that changes a fleet: who, from where, what."""

    what: str
    run: str = field(
        default_factory=lambda: f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    )
    who: str = field(default_factory=lambda: operator())
    where: str = field(default_factory=lambda: f"{socket.gethostname()} pid {os.getpid()}")


def operator() -> str:
    """Who runs this: also behind sudo."""
    user = os.environ.get("SUDO_USER")
    if user:
        return user
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def lock_host(fleet: Fleet) -> str:
    """The host that holds the lock: the first gateway, else the first host of all."""
    gateways = fleet.group("gateway")
    return (gateways or fleet.hosts)[0].name


def told(holder: Mapping[str, Any], host: str) -> str:
    """Who holds the lock, and what to do about it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(holder.get("since") or 0)))
    silent = float(holder.get("silent") or 0)
    text = (
        f"this fleet is being changed by {holder.get('who')} ({holder.get('where')}): "
        f"{holder.get('what')}, run {holder.get('run')}, since {since}; lock on {host}, last sign "
        f"of life {silent:.0f} s ago"
    )
    if not holder.get("stale"):
        return f"{text}. Wait until that run has ended"
    return (
        f"{text}: it was killed, or has lost its network. When that process is gone for certain, "
        f"run again with --data unlock={holder.get('run')}: it goes on where that one was"
    )


class Lock:
    """The lock, held while the block lasts."""

    def __init__(
        self, hosts: Hosts, host: str, holder: Holder, *, beat_seconds: float = BEAT_SECONDS
    ) -> None:
        self.host = host
        self.holder = holder
        self._hosts = hosts
        self._beat_seconds = beat_seconds
        self._over = threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        """Take it. Raises Locked where somebody else has it, Failed where its host is lost."""
        order = {"action": "lock", "holder": vars(self.holder), "stale": STALE_SECONDS}
        answer = self._hosts.ask(self.host, "ledger", order)
        if not answer.get("taken"):
            raise Locked(told(answer.get("holder") or {}, self.host))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back. Where its host is lost, the next run is told of a stale lock."""
        self._over.set()
        self._thread.join()
        try:
            self._hosts.ask(self.host, "ledger", {"action": "release", "run": self.holder.run})
        except Failed as failed:
            self._hosts.say(
                f"the lock could not be given back ({failed}); the next run will name it"
            )

    def check(self) -> None:
        """Raises Locked where the lock was taken away: nothing further may be begun."""
        if self._lost:
            raise Locked(self._lost)

    def _beat(self) -> None:
        while not self._over.wait(self._beat_seconds):
            try:
                order = {"action": "beat", "run": self.holder.run}
                answer = self._hosts.ask(self.host, "ledger", order)
            except Failed:
                continue  # a short break of the network is no reason; the lock ages meanwhile
            if not answer.get("held"):
                other = answer.get("holder") or {}
                by = f"run {other.get('run')} of {other.get('who')}" if other else "somebody"
                self._lost = f"the lock was taken away by {by}: nothing further was begun"
                return


def unlocked(hosts: Hosts, host: str, run: str) -> str:
    """Take the lock from a run that is gone; what was done. Raises Failed where it is another's."""
    answer = hosts.ask(host, "ledger", {"action": "unlock", "run": run, "by": operator()})
    if not answer.get("unlocked"):
        return f"nobody held the lock on {host}"
    holder = answer.get("holder") or {}
    return f"the lock on {host} was taken from run {run} of {holder.get('who')}"


def recorded(
    hosts: Hosts,
    places: Sequence[str],
    lines: Sequence[Mapping[str, Any]],
    marks: Mapping[str, str],
) -> None:
    """Write audit lines and marks on some hosts; one that is lost does not stop the others."""
    for host in dict.fromkeys(places):
        try:
            order = {"action": "audit", "lines": list(lines), "marks": dict(marks)}
            hosts.ask(host, "ledger", order)
        except Failed as failed:
            hosts.say(f"not in the audit log there: {failed}")
