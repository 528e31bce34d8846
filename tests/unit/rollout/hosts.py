"""A host for the scripts of a change: its file system in a folder, systemd as a stand-in."""

from __future__ import annotations

import grp
import json
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.onhost import apply, instances, ledger, switch

USER = pwd.getpwuid(os.geteuid()).pw_name
GROUP = grp.getgrgid(os.getegid()).gr_name


class Killed(BaseException):
    """The script or the whole host is gone at this moment."""


class Host:
    """One instance `a` on one host; ``bad`` releases fail to start."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.bad: set[str] = set()
        self.unit = {"ActiveState": "inactive", "SubState": "dead", "InvocationID": ""}
        self.starts: list[str] = []  # checksum of each start
        self.calls: list[tuple[str, ...]] = []
        self.kill_in = 0  # calls to the system until it is killed; 0: never
        for module, names in (
            (apply, {"STATE": "state", "MANIFEST": "state/manifest.json", "UNITS": "units/"}),
            (ledger, {"STATE": "state", "ROOT": "state/_rollout", "METRICS": "state/metrics"}),
            (instances, {"STATE": "state"}),
            (
                switch,
                {"STATE": "state", "RUN": "run", "ETC": "etc", "UNITS": "units", "RELEASES": "rel"},
            ),
        ):
            for name, path in names.items():
                monkeypatch.setattr(module, name, str(root / path))
        for folder in ("state/metrics", "run/a", "etc", "units", "rel", "weights"):
            (root / folder).mkdir(parents=True)
        (root / "weights/config.json").write_text("{}")
        monkeypatch.setattr(instances, "systemctl", self.systemctl)
        monkeypatch.setattr(instances, "show", lambda unit: dict(self.unit))
        monkeypatch.setattr(instances, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(switch, "POLL_SECONDS", 0.001)
        monkeypatch.setattr(switch, "holding", lambda env: [])
        monkeypatch.setattr(switch, "answers", lambda port: True)
        for name in ("replace", "unlink", "open", "chown"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def change(self) -> Any:
        """What those who watch are told of a planned change of the instance; None: of none."""
        path = self.root / "state/changes/a.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.maybe_killed()
            return call(*args, **kwargs)

        return counted

    def maybe_killed(self) -> None:
        if self.kill_in:
            self.kill_in -= 1
            if not self.kill_in:
                raise Killed

    def systemctl(self, *words: str) -> tuple[int, str]:
        """The few words that the scripts say to systemd."""
        self.maybe_killed()
        self.calls.append(words)
        if words[0] == "stop":
            self.stop()
        elif words[0] in ("start", "restart") and self.unit["ActiveState"] != "active":
            self.start()
        elif words[0] == "show":
            return 0, "1min"
        return 0, ""

    def stop(self) -> None:
        self.unit.update(ActiveState="inactive", SubState="dead")
        (self.root / "run/a/ready").unlink(missing_ok=True)

    def start(self) -> None:
        """As systemd and before_start do it."""
        assert not Path(switch.marker("a")).exists(), "started while its files may be mixed"
        env = switch.variables((self.root / "etc/a.env").read_text())
        self.starts.append(env["FLEET_CHECKSUM"])
        (self.root / "state/a").mkdir(exist_ok=True)
        (self.root / "state/a/running").write_text(env["FLEET_CHECKSUM"] + "\n")
        if os.path.basename(env["FLEET_RELEASE"]) in self.bad:
            self.unit.update(ActiveState="failed", Result="exit-code")
            return
        self.unit.update(ActiveState="active", InvocationID=f"i{len(self.starts)}")
        (self.root / "run/a/ready").write_text("1")
        warm = {"load_seconds": 3.0, "warm_seconds": 1.0, "vllm_version": "0"}
        (self.root / "state/a/warmup.json").write_text(json.dumps(warm))

    def version(self, release: str, *, plan: bool = False) -> dict[str, Any]:
        """A version of the instance and its release, staged on this host."""
        (self.root / "rel" / release).mkdir(exist_ok=True)
        (self.root / "rel" / release / "release.json").write_text("{}")
        checksum = release.encode().hex().ljust(64, "0")
        env = (
            f'FLEET_RELEASE="{self.root}/rel/{release}"\nFLEET_CHECKSUM="{checksum}"\n'
            f'FLEET_PORT="8001"\nFLEET_WEIGHTS="{self.root}/weights"\nTOKEN="secret"\n'
        )
        texts = {"etc/a.sh": f"exec {release}\n", "etc/a.env": env}
        texts |= {"units/vllm@a.service.d/10-instance.conf": f"# {release}\n"}
        if plan:
            texts = {"etc/a.plan.json": "{}\n", **texts}
        files = [
            {"path": str(self.root / p), "content": t, "mode": "640", "owner": USER, "group": GROUP}
            for p, t in texts.items()
        ]
        return {"release": release, "checksum": checksum, "files": files}

    def deploy(self, version: dict[str, Any]) -> None:
        """Put a version as deploy.py does, and start it."""
        for file in version["files"]:
            apply.write(file["path"], file["content"].encode(), 0o640, os.getuid(), os.getgid())
        ledger.write(apply.MANIFEST, json.dumps(apply.checksums(version["files"])))
        self.start()

    def do(self, action: str, **order: Any) -> Any:
        """Run an action of switch.py as its main does."""
        with ledger.guarded("a"):
            return switch.ACTIONS[action]({"action": action, "instance": "a", **order})

    def texts(self) -> dict[str, str]:
        """The instance's own files as they are."""
        paths = [*(self.root / "etc").iterdir(), *(self.root / "units").glob("*/*")]
        return {str(p): p.read_text() for p in paths if not p.name.endswith("-new")}

    @contextmanager
    def killed_after(self, calls: int) -> Iterator[list[bool]]:
        """Be killed at the n-th call to the system; the list says whether it was."""
        was = [False]
        self.kill_in = calls
        try:
            yield was
        except Killed:
            was[0] = True
        finally:
            self.kill_in = 0


def texts_of(version: dict[str, Any]) -> dict[str, str]:
    return {file["path"]: file["content"] for file in version["files"]}
