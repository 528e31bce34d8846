"""Parts of the bed that need no root: saved settings, pip's configuration, processes, the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.testbed import bed, demo, hosts, outer, services, wheels
from tests.testbed.fabric import OuterSettings
from tests.testbed.services import REPO, Process

FORWARD = "net.ipv4.ip_forward"
INOTIFY = "fs.inotify.max_user_instances"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for name, value in ((FORWARD, 0), (INOTIFY, 128)):
        path = tmp_path / "proc" / name.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return tmp_path / "proc"


def read(proc: Path, name: str) -> int:
    return int((proc / name.replace(".", "/")).read_text())


def test_the_last_bed_restores_what_the_first_one_found(tmp_path: Path, proc: Path) -> None:
    settings = OuterSettings(tmp_path / "saved.json", proc)
    settings.raise_to(INOTIFY, 8192, "a")
    settings.raise_to(INOTIFY, 8192, "b")
    settings.raise_to(FORWARD, 1, "b")
    settings.release("a", alive=["b"])
    assert (read(proc, INOTIFY), read(proc, FORWARD)) == (8192, 1)
    settings.release("b", alive=[])
    assert (read(proc, INOTIFY), read(proc, FORWARD)) == (128, 0)
    assert not (tmp_path / "saved.json").exists()


def test_a_killed_bed_does_not_keep_settings(tmp_path: Path, proc: Path) -> None:
    settings = OuterSettings(tmp_path / "saved.json", proc)
    settings.raise_to(INOTIFY, 8192, "killed")
    settings.raise_to(INOTIFY, 8192, "b")
    settings.release("b", alive=["b", "other"])
    assert read(proc, INOTIFY) == 128


def test_a_setting_that_is_high_enough_is_left_alone(tmp_path: Path, proc: Path) -> None:
    settings = OuterSettings(tmp_path / "saved.json", proc)
    settings.raise_to(INOTIFY, 100, "a")
    assert read(proc, INOTIFY) == 128
    settings.release("a", alive=[])
    assert read(proc, INOTIFY) == 128


def test_pip_configuration() -> None:
    listed = (
        ":env:.find-links='/opt/wheels'\n"
        "global.extra-index-url='https://one/simple https://two/simple'\n"
        "global.find-links='/other'\n"
        "global.index-url='https://main/simple'\n"
        "install.find-links='/not/for/download'\n"
    )
    assert wheels.parse_pip_config(listed) == {
        "find-links": ["/opt/wheels"],
        "extra-index-url": ["https://one/simple", "https://two/simple"],
        "index-url": ["https://main/simple"],
    }


def test_the_committed_lock_is_for_the_demo() -> None:
    lock = wheels.VLLM_LOCK.read_text()
    names = {line.split("==")[0] for line in lock.splitlines() if "==" in line}
    assert f"{wheels.VLLM_PACKAGE}=={wheels.VLLM_VERSION} \\" in lock.splitlines()
    assert "torch" in names
    assert not names & set(wheels.EXCLUDED)
    assert "://" not in lock, "a lock names no addresses"
    settings = yaml.safe_load((REPO / "group_vars/demo.yml").read_text())
    assert settings["vllm_version"] == wheels.VLLM_VERSION
    assert settings["vllm_package"] == wheels.VLLM_PACKAGE
    assert settings["vllm_exclude"] == list(wheels.EXCLUDED)


def test_demo_settings_name_what_the_bed_serves() -> None:
    settings = yaml.safe_load((REPO / "group_vars/demo.yml").read_text())
    fabric = outer.Net().fabric
    assert settings["hub"]["endpoint"] == f"http://{fabric}:{bed.HUB_PORT}"
    assert settings["package_index"]["find_links"] == [f"http://{fabric}:{bed.WHEELS_PORT}/"]
    assert {m["repo"] for m in settings["models"].values()} == set(bed.MODELS)
    assert tuple(settings["models"]) == demo.MODELS
    named = {host for i in settings["instances"] for host in i["hosts"]}
    assert named < {spec.name for spec in bed.demo_hosts()}


def test_the_inventory_says_that_the_bed_is_down(tmp_path: Path) -> None:
    environment = {**os.environ, "FLEET_TESTBED": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(REPO / "inventory/demo.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "inventory/demo.py: the demo's hosts are not up; `make demo` makes them\n"
    )


def test_the_inventory_takes_hosts_from_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {name: {"ssh_hostname": name} for name in ("demo-gpu-1", "demo-gw", "small")}
    (tmp_path / "state.json").write_text(json.dumps({"inventory": hosts}))
    monkeypatch.setenv("FLEET_TESTBED", str(tmp_path))
    path = REPO / "inventory/demo.py"
    names: dict[str, object] = {"__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert names["gpu"] == [("demo-gpu-1", {"ssh_hostname": "demo-gpu-1"})]
    assert names["gateway"] == names["monitoring"] == [("demo-gw", {"ssh_hostname": "demo-gw"})]


def test_a_process_is_told_from_a_later_one_of_its_pid() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        started = services._start_time(child.pid)
        assert started is not None
        assert Process(child.pid, started).alive()
        Process(child.pid, started + 1).stop()  # another process: left alone
        assert child.poll() is None
        Process(child.pid, started).stop()
        assert child.wait(5) == -15


def test_wheels_of_the_stand_in_do_not_outlive_a_host(tmp_path: Path) -> None:
    index = "uv/wheels-v8/index/8356bfdd"
    others = [f"{index}/uvicorn/a", "abc/uv/archive/vllm-standin", f"abc/{index}/click/a"]
    made = [f"{index}/vllm-standin/a", f"abc/{index}/vllm-standin/a", f"{index}/vllm-standin.rkyv"]
    for name in (*others, *made):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    hosts.forget_standins(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*others}
