"""Files of an instance and of its host."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.systemd_env import read_env_file
from tests.unit.planned import planned
from vllm_fleet import instance, paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import PlannedInstance

# Each of these has stopped CUDA, a JIT compiler, RDMA or a neighbour (see the unit's comments).
BREAKING = {
    "PrivateDevices": "yes",
    "MemoryDenyWriteExecute": "yes",
    "ProcSubset": "pid",
    "RemoveIPC": "yes",
    "DynamicUser": "yes",
    "PrivateNetwork": "yes",
    "PrivateUsers": "yes",
    "PrivateIPC": "yes",
    "NoExecPaths": None,  # None: whatever its value
    "IPAddressDeny": None,
    "MemoryMax": None,
    "MemoryHigh": None,
    "BindPaths": None,
}


def by_path(files: list[ManagedFile]) -> dict[str, ManagedFile]:
    return {file.path: file for file in files}


def env_of(planned_instance: PlannedInstance, tmp_path: Path) -> dict[str, str]:
    file = by_path(instance.files(planned_instance))[f"/etc/vllm/{planned_instance.name}.env"]
    path = tmp_path / "env"
    path.write_text(file.content)
    return read_env_file(path)


def unit() -> str:
    return by_path(instance.host_files("cuda"))["/etc/systemd/system/vllm@.service"].content


def directives(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_files_and_their_rights() -> None:
    files = instance.files(planned())
    assert [(f.path, f.mode, f.owner, f.group, f.secret) for f in files] == [
        ("/etc/vllm/air-a.sh", 0o755, "root", "root", False),
        (
            "/etc/systemd/system/vllm@air-a.service.d/10-instance.conf",
            0o644,
            "root",
            "root",
            False,
        ),
        ("/etc/vllm/air-a.env", 0o640, "root", "vllm", True),
    ]


def test_every_file_carries_our_mark() -> None:
    for device in ("cuda", "rocm", "cpu"):
        for file in instance.files(planned()) + instance.host_files(device):
            assert paths.MARK in "\n".join(file.content.splitlines()[:2]), file.path
            assert file.content.endswith("\n")


def test_environment_of_cuda_cards(tmp_path: Path) -> None:
    env = env_of(planned(), tmp_path)
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["FLEET_CARD_UUIDS"] == "GPU-aaaa,GPU-bbbb"
    assert env["PATH"].startswith("/opt/vllm/releases/0.21.0-abc/bin:")
    assert env["PYTHONPATH"] == "/opt/vllm/lib"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "HIP_VISIBLE_DEVICES" not in env


def test_environment_of_amd_cards_and_of_none(tmp_path: Path) -> None:
    amd = env_of(planned(device="rocm", uuids=()), tmp_path)
    assert amd["HIP_VISIBLE_DEVICES"] == "4,5"
    assert "CUDA_VISIBLE_DEVICES" not in amd
    cpu = env_of(planned(device="cpu", cards=(), uuids=()), tmp_path)
    assert not {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & cpu.keys()


def test_all_caches_are_of_this_instance_and_release(tmp_path: Path) -> None:
    env = env_of(planned(), tmp_path)
    for key in instance.CACHES:
        assert env[key].startswith("/var/lib/vllm/air-a/cache/0.21.0-abc/"), key
        assert f'"${key}"' in instance.files(planned())[0].content, "the launch script makes it"
    assert env["HOME"] == "/var/lib/vllm/air-a"


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "",
        "two words  and two blanks ",
        'a "quoted" word',
        "it's",
        "$HOME ${X} $(id) `id`",
        "back\\slash \\n \\\\ end\\",
        "# no comment",
        "; no comment",
        "100%",
        "a=b",
        "tab\there",
        "two\nlines",
        "中文 ü",
        '{"a": ["b", "c\\"d"]}',
    ],
)
def test_systemd_reads_back_what_the_operator_wrote(tmp_path: Path, value: str) -> None:
    env = env_of(planned(env={"X": value, "AFTER": "there"}), tmp_path)
    assert env["X"] == value
    assert env["AFTER"] == "there"


@pytest.mark.parametrize("value", ["\0", "\x1b[0m", "\r", "\x7f"])
def test_control_characters_are_refused_by_name(value: str) -> None:
    with pytest.raises(instance.InstanceError, match="air-a on gpu-01: env `X` holds the control"):
        instance.files(planned(env={"X": value}))


@pytest.mark.parametrize("key", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "FLEET_RUN"])
def test_what_the_plan_sets_cannot_be_set_again(key: str) -> None:
    with pytest.raises(instance.InstanceError, match=f"env `{key}` is set by the plan"):
        instance.files(planned(env={key: "0"}))


def test_the_operators_environment_wins_elsewhere(tmp_path: Path) -> None:
    env = env_of(planned(env={"HF_HUB_OFFLINE": "0", "PYTHONPATH": "/my/plugins"}), tmp_path)
    assert env["HF_HUB_OFFLINE"] == "0"
    assert env["PYTHONPATH"] == "/opt/vllm/lib:/my/plugins", "the gate is still found"


def test_launch_script_replaces_its_shell() -> None:
    script = instance.files(planned())[0].content
    assert script.startswith("#!/bin/sh\n")
    assert re.search(r"^exec /opt/vllm/releases/0\.21\.0-abc/bin/vllm serve ", script, re.M)
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def test_limits_of_time_follow_the_settings() -> None:
    found = directives(instance.files(planned(start_seconds=1800, drain_seconds=600))[1].content)
    assert found["TimeoutStartSec"] == ["1830"]
    assert found["TimeoutStopSec"] == ["660"], "drain, then 30 s to end, then systemd's kill"
    assert found["Environment"] == ["FLEET_START_SECONDS=1800 FLEET_DRAIN_SECONDS=600"]
    # four starts that fail one after the other must fall into the window
    assert int(found["StartLimitIntervalSec"][0]) >= 600


def test_amd_units_join_the_groups_of_their_nodes() -> None:
    groups = "SupplementaryGroups=render video"
    assert groups in instance.files(planned(device="rocm", uuids=()))[1].content
    assert groups not in instance.files(planned())[1].content


def test_checksum_is_what_the_environment_claims(tmp_path: Path) -> None:
    assert env_of(planned(), tmp_path)["FLEET_CHECKSUM"] == instance.running_checksum(planned())


@pytest.mark.parametrize(
    "changed",
    [
        planned(port=8002),
        planned(cards=(4, 6)),
        planned(uuids=("GPU-aaaa", "GPU-cccc")),
        planned(release="0.22.0-abc"),
        planned(weights="/opt/vllm/models/glm-4.5-air/v2.0"),
        planned(args={"max-num-seqs": 8}),
        planned(env={"NCCL_DEBUG": "INFO"}),
        planned(model={"aliases": ("glm",)}),
        planned(model={"task": "embed"}),
    ],
)
def test_a_change_that_needs_a_restart_changes_the_checksum(changed: PlannedInstance) -> None:
    assert instance.running_checksum(changed) != instance.running_checksum(planned())


def test_limits_of_time_need_no_restart() -> None:
    changed = planned(start_seconds=60, drain_seconds=5)
    assert instance.running_checksum(changed) == instance.running_checksum(planned())


def test_a_new_gate_needs_a_restart_and_a_new_comment_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, source = instance.running_checksum(planned()), instance._source("gate")
    monkeypatch.setattr(instance, "_source", lambda name: "# new comment\n" + source)
    assert instance.running_checksum(planned()) == before
    monkeypatch.setattr(instance, "_source", lambda name: source + "x = 1\n")
    assert instance.running_checksum(planned()) != before


def test_unit_has_no_directive_that_breaks_cuda_or_rdma() -> None:
    found = directives(unit())
    for key, value in BREAKING.items():
        assert key not in found or (value is not None and found[key] != [value]), key
    assert {"AF_UNIX", "AF_NETLINK"} <= set(found["RestrictAddressFamilies"][0].split())
    assert found["DevicePolicy"] == ["closed"]
    for device in found["DeviceAllow"]:
        assert not re.search(r"/dev/nvidia\d", device), "a rule for one card renumbers CUDA's view"
    assert {"char-nvidia* rw", "char-infiniband* rw"} <= set(found["DeviceAllow"])
    assert found["LimitMEMLOCK"] == ["infinity"]


def test_unit_stops_and_restarts_as_vllm_needs() -> None:
    found = directives(unit())
    assert found["Type"] == ["exec"]
    assert found["KillMode"] == ["mixed"]
    assert found["Restart"] == ["always"]
    assert found["RestartPreventExitStatus"] == ["2"]
    assert found["User"] == ["vllm"]
    assert found["LimitCORE"] == ["0"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze (systemd)")
def test_systemd_accepts_the_unit_and_scores_it_below_4(tmp_path: Path) -> None:
    folder = tmp_path / "vllm@air-a.service.d"
    folder.mkdir()
    (folder / "10-instance.conf").write_text(instance.files(planned())[1].content)
    path = tmp_path / "vllm@air-a.service"
    # the program is not there on this machine, and that is all that may be complained of
    path.write_text(unit().replace("/etc/vllm/%i.sh", "/bin/true"))
    nodes = by_path(instance.host_files("cuda"))["/etc/systemd/system/vllm-device-nodes.service"]
    nodes_path = tmp_path / "vllm-device-nodes.service"
    nodes_path.write_text(nodes.content.replace("/usr/bin/nvidia-modprobe -u -c 0", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path, nodes_path], capture_output=True, text=True
    )
    ours = [line for line in verified.stderr.splitlines() if "vllm" in line]
    assert ours == []
    analyzed = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", path],
        capture_output=True,
        text=True,
    )
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", analyzed.stdout)
    assert score, analyzed.stdout + analyzed.stderr
    assert float(score[1]) < 4.0


def test_host_files_by_device() -> None:
    cuda, cpu = by_path(instance.host_files("cuda")), by_path(instance.host_files("cpu"))
    assert {f"/opt/vllm/lib/{n}.py" for n in ("gate", "before_start", "warmup", "stop")} <= set(cpu)
    assert set(cuda) - set(cpu) == {
        "/etc/systemd/system/vllm-device-nodes.service",
        "/etc/apt/apt.conf.d/52vllm-fleet",
    }
    free = by_path(instance.host_files("cuda", hold_driver_packages=False))
    assert "/etc/apt/apt.conf.d/52vllm-fleet" not in free


def test_scripts_are_python_that_compiles() -> None:
    for file in instance.host_files("cuda"):
        if file.path.endswith(".py"):
            compile(file.content, file.path, "exec")


def test_a_percent_sign_in_a_path_is_no_specifier() -> None:
    content = instance.files(planned(weights="/data/100% real/w"))[1].content
    assert 'RequiresMountsFor="/data/100%% real/w"' in content


@pytest.mark.skipif(not shutil.which("apt-config"), reason="needs apt-config (apt)")
def test_apt_reads_the_driver_rule(tmp_path: Path) -> None:
    file = by_path(instance.host_files("cuda"))["/etc/apt/apt.conf.d/52vllm-fleet"]
    path = tmp_path / "apt.conf"
    path.write_text(file.content)
    dumped = subprocess.run(
        ["apt-config", "dump"],
        env={"APT_CONFIG": str(path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 'Unattended-Upgrade::Package-Blacklist:: "^nvidia-";' in dumped
