"""The hosts of a rollout, over pyinfra's connections: also those that `--limit` left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyinfra import logger
from pyinfra.api import Host, State, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.context import ctx_config, ctx_host

from vllm_fleet.operations.alive import while_alive
from vllm_fleet.operations.remote import bundled
from vllm_fleet.rollout.hosts import REFUSED, RESULT, SCRIPTS, Failed, Json, result_of

TICK_SECONDS = 20.0
# What an operator waits for; of everything else only what it found is told.
LONG = ("switch", "watch", "drain", "acceptance", "rehearse", "halt", "resume", "adopt")
# Seconds beyond what the order itself allows, after which a host that says nothing is lost: a
# network that went away without a word would be waited for without end.
PATIENCE = {"switch": 7200, "halt": 7200, "acceptance": 3600, "rehearse": 600, "boot": 15}
PATIENCE |= dict.fromkeys(("path", "ports", "rank"), 30)
PATIENCE_ELSE = 120


class Reached:
    """Hosts by name. One whose connection broke is connected to once more."""

    def __init__(self, state: State, root: Path, run: str) -> None:
        self._state = state
        self._by_name = {one.name: one for one in state.inventory}
        self._logs = root / "rollout-logs" / run

    def connect(self, names: Iterable[str]) -> None:
        """Have a connection to each of them. Raises Failed, naming those that cannot be reached."""
        lost = []
        for name in names:
            try:
                self._connected(self._by_name[name])
            except (ConnectError, PyinfraError) as error:
                lost.append(f"{name}: {error}")
        if lost:
            raise Failed("; ".join(lost))

    def ask(self, host: str, script: str, order: Mapping[str, Any]) -> Json:
        """Run a script of ours and read its result. Raises Failed."""
        target = self._by_name[host]
        action = str(order.get("action") or script)
        who = str(order.get("instance") or " ".join(order.get("instances") or ()))
        label = tuple(word for word in (script, action, who) if word)
        command = bundled(label, dict(order), *SCRIPTS[script])
        patience = int(order.get("seconds") or 0) + PATIENCE.get(action, PATIENCE_ELSE)
        over = threading.Event()
        if action in LONG:
            threading.Thread(target=self._tick, args=(over, label, host), daemon=True).start()
        try:
            lines = self._lines(target, command, patience)
        finally:
            over.set()
        for line in lines:
            if action in LONG and not line.startswith((RESULT, REFUSED)):
                self.say(f"{host}: {line}")
        return result_of(host, lines)

    def say(self, text: str) -> None:
        """Tell the operator."""
        logger.info("    %s", text)

    def save(self, name: str, lines: Sequence[str]) -> str:
        """Keep lines beside group_vars; the path."""
        self._logs.mkdir(parents=True, exist_ok=True)
        path = self._logs / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    def _lines(self, target: Host, command: StringCommand, patience: int) -> list[str]:
        problem = "no connection"
        for _ in range(2):
            try:
                self._connected(target)
                # Every script may be run again: what an earlier one does is waited for.
                with ctx_config.use(self._state.config.copy()), ctx_host.use(target):
                    arguments, _ = pop_global_arguments(self._state, target, {})
                    kept = {k: v for k, v in arguments.items() if k in CONNECTOR_ARGUMENT_KEYS}
                    kept.update(command.connector_arguments)
                    kept["_timeout"] = patience
                    with while_alive(target):
                        _, output = target.run_shell_command(command, **kept)
                return [str(line.line) for line in output]
            except Exception as error:  # connectors raise whatever their library does
                problem = f"{type(error).__name__}: {error}"
                target.disconnect()
        raise Failed(f"{target.name}: connection lost ({problem})")

    def _connected(self, target: Host) -> None:
        if not target.connected:
            target.connect(reason="for the rollout", show_errors=False, raise_exceptions=True)

    def _tick(self, over: threading.Event, label: Sequence[str], host: str) -> None:
        began = time.monotonic()
        while not over.wait(TICK_SECONDS):
            self.say(f"{host}: {' '.join(label[1:])}: {time.monotonic() - began:.0f} s")
