"""What refuses a start, with a stand-in for nvidia-smi and real sockets and processes."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_fleet.gate import before_start
from vllm_fleet.gate.before_start import Refused

CARDS = {0: "GPU-aaaa", 1: "GPU-bbbb", 2: "GPU-cccc"}


class Smi:
    """A program named nvidia-smi that prints what the test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cards(CARDS)
        self.processes("")
        program = folder / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in *compute-apps*) cat {folder}/apps;; *) cat {folder}/gpus;; '
            f"esac\nexit $(cat {folder}/rc 2>/dev/null || echo 0)\n"
        )
        program.chmod(0o755)

    def cards(self, cards: dict[int, str]) -> None:
        (self.folder / "gpus").write_text("".join(f"{i}, {u}\n" for i, u in cards.items()))

    def processes(self, text: str) -> None:
        (self.folder / "apps").write_text(text)

    def fails(self, text: str) -> None:
        (self.folder / "gpus").write_text(text)
        (self.folder / "rc").write_text("9")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidia-uvm" or exists(path))
    return Smi(folder)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    for folder in ("run", "state", "weights", "release/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "weights" / "config.json").write_text("{}")
    program = tmp_path / "release" / "bin" / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "FLEET_INSTANCE": "air-a",
        "FLEET_HOST": "gpu-01",
        "FLEET_DEVICE": "cpu",
        "FLEET_CARDS": "",
        "FLEET_CARD_UUIDS": "",
        "FLEET_PORT": str(port),
        "FLEET_RELEASE": str(tmp_path / "release"),
        "FLEET_WEIGHTS": str(tmp_path / "weights"),
        "FLEET_RUN": str(tmp_path / "run"),
        "FLEET_STATE": str(tmp_path / "state"),
        "FLEET_USER": pwd.getpwuid(os.getuid()).pw_name,
        "FLEET_CHECKSUM": "abc123",
    }


def test_a_good_start_makes_token_and_checksum(env: dict[str, str]) -> None:
    run, state = Path(env["FLEET_RUN"]), Path(env["FLEET_STATE"])
    for stale in ("ready", "token", "in-flight.1"):
        (run / stale).write_text("old")
    assert before_start.main([], env) == 0
    assert [path.name for path in run.iterdir()] == ["token"], "what an earlier start left is gone"
    token = (run / "token").read_text().strip()
    assert len(token) == 64
    assert stat.S_IMODE((run / "token").stat().st_mode) == 0o600
    assert (state / "running").read_text() == "abc123\n"
    assert before_start.main([], env) == 0
    assert (run / "token").read_text().strip() != token, "another start, another token"


def test_a_planted_link_does_not_lead_root_elsewhere(env: dict[str, str], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (Path(env["FLEET_STATE"]) / "running").symlink_to(victim)
    assert before_start.main([], env) == 0
    assert victim.read_text() == "precious"


def test_a_refused_start_writes_no_checksum(
    env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert before_start.main([], env | {"FLEET_RELEASE": "/nowhere"}) == 1
    assert not (Path(env["FLEET_STATE"]) / "running").exists()
    error = capsys.readouterr().err
    assert "gpu-01, instance air-a: /nowhere/bin/vllm is missing" in error
    assert "deploy this host again" in error


def test_missing_weights(env: dict[str, str]) -> None:
    with pytest.raises(Refused, match=r"has no config.json: the weights are not there"):
        before_start.check_paths(env["FLEET_RELEASE"], "/nowhere")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to look with another user's eyes")
def test_weights_that_the_instances_user_cannot_read(tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    weights = tmp_path / "weights"
    weights.mkdir()
    shard = weights / "model.safetensors"
    shard.touch(0o600)
    with pytest.raises(Refused, match=f"user nobody cannot read {shard}; run `chmod -R a.rX`"):
        before_start.check_readable(str(weights), nobody)
    shard.chmod(0o644)
    before_start.check_readable(str(weights), nobody)
    weights.chmod(0o700)
    with pytest.raises(Refused, match=f"user nobody cannot read .*{weights}"):
        before_start.check_readable(str(weights), nobody)


def test_a_taken_port_names_who_holds_it() -> None:
    code = "import socket, time; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); " + (
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    try:
        port = int(holder.stdout.readline())
        with pytest.raises(Refused) as refusal:
            before_start.check_port(port, seconds=0.3)
    finally:
        holder.kill()
        holder.wait()
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f"port {port} is held by pid {holder.pid} of {user}: {sys.executable}" in str(
        refusal.value
    )
    assert "another `port`" in str(refusal.value)
    before_start.check_port(port, seconds=2)


def test_cards_as_planned(smi: Smi) -> None:
    before_start.check_cards([1, 2], ["GPU-bbbb", "GPU-cccc"])
    before_start.check_cards_free(["GPU-bbbb"], seconds=0)


def test_a_lost_card_shifts_the_indices(smi: Smi) -> None:
    smi.cards({0: "GPU-aaaa", 1: "GPU-cccc"})
    with pytest.raises(Refused, match="planned as GPU-cccc, which now has index 1"):
        before_start.check_cards([2], ["GPU-cccc"])
    with pytest.raises(Refused, match=r"card 1 \(GPU-bbbb\) is gone; nvidia-smi shows GPU-cccc"):
        before_start.check_cards([1], ["GPU-bbbb"])
    with pytest.raises(Refused, match=r"card 7 .* shows nothing at this index"):
        before_start.check_cards([7], ["GPU-dddd"])


def test_no_uvm_node(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(Refused, match="/dev/nvidia-uvm is missing"):
        before_start.check_cards([0], ["GPU-aaaa"])


def test_a_foreign_process_on_a_card_is_named(smi: Smi) -> None:
    holder = subprocess.Popen(["sleep", "60"])
    try:
        smi.processes(f"{holder.pid}, GPU-bbbb, 10240 MiB\n4194999, GPU-aaaa, 5 MiB\n")
        with pytest.raises(Refused) as refusal:
            before_start.check_cards_free(["GPU-bbbb"], seconds=0)
        before_start.check_cards_free(["GPU-cccc"], seconds=0)
    finally:
        holder.kill()
        holder.wait()
    user = pwd.getpwuid(os.getuid()).pw_name
    expected = f"GPU-bbbb holds 10240 MiB by pid {holder.pid} of {user}: sleep 60."
    assert expected in str(refusal.value)
    assert "4194999" not in str(refusal.value), "that card is not ours"


def test_memory_that_comes_back_late_is_waited_for(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.processes("4194999, GPU-bbbb, [N/A]\n")
    monkeypatch.setattr(time, "sleep", lambda seconds: smi.processes(""))
    before_start.check_cards_free(["GPU-bbbb"], seconds=30)


def test_nvidia_smi_that_fails_hangs_or_is_missing(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    smi.fails("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    with pytest.raises(Refused, match="failed: NVIDIA-SMI has failed because"):
        before_start.card_uuids()
    (smi.folder / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(before_start, "NVIDIA_SMI_SECONDS", 0.2)
    with pytest.raises(Refused, match="does not answer within"):
        before_start.card_uuids()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="nvidia-smi is not installed"):
        before_start.card_uuids()


def test_after_stop_waits_for_the_cards(
    smi: Smi, env: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    env |= {"FLEET_DEVICE": "cuda", "FLEET_CARDS": "1", "FLEET_CARD_UUIDS": "GPU-bbbb"}
    assert before_start.main(["--after-stop"], env) == 0
    smi.processes("4194999, GPU-bbbb, 10 MiB\n")
    monkeypatch.setattr(before_start, "check_cards_free", _at_once(before_start.check_cards_free))
    assert before_start.main(["--after-stop"], env) == 1
    assert "its cards are not free" in capsys.readouterr().err


def _at_once(check: Any) -> Any:
    return lambda uuids: check(uuids, seconds=0)


def test_an_adapter_that_is_not_there_is_named(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.getuid())
    (tmp_path / "good").mkdir()
    (tmp_path / "good/adapter_config.json").write_text("{}")
    before_start.check_adapters([str(tmp_path / "good")], user)
    with pytest.raises(Refused, match=r"bad has no adapter_config.json: put the LoRA adapter"):
        before_start.check_adapters([str(tmp_path / "good"), str(tmp_path / "bad")], user)
