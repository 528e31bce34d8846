"""The main job on real hosts with the real vLLM: deployed, serving, broken, changed.

The tests share one deployed fleet and run in the order in which they stand here.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.integration.deployed import Deployed
from tests.integration.operators import changes
from tests.testbed import hub, tiny_models

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

GPU_HOSTS = ("demo-gpu-1", "demo-gpu-2")
INSTANCES = tuple((host, name) for host in GPU_HOSTS for name in ("glm", "qwen"))
ROUND = 0.15  # seconds by which clocks of log lines may differ


def test_the_first_deploy_does_every_chapter(deployed: Deployed) -> None:
    done = changes(deployed.first_run)
    assert done["Debian packages"][0] == "3"
    assert done["Instances that do not run"][0] == "2"
    assert all(error == "-" for _, error, _ in done.values())


def test_a_second_deploy_changes_nothing_with_few_commands(deployed: Deployed) -> None:
    began = time.monotonic()
    done = deployed.operator.deploy("--debug")
    took = time.monotonic() - began
    assert done.returncode == 0, done.stdout
    assert "everything on them is as wanted" in done.stdout
    assert changes(done.stdout) == {}
    for host in (*GPU_HOSTS, "demo-gw"):
        commands = re.findall(rf"Running command on {host}: ", done.stdout)
        assert 1 <= len(commands) <= 6
        print(f"{host}: {len(commands)} remote commands; run of {took:.1f} s")


def test_both_models_answer_stream_and_are_listed(deployed: Deployed) -> None:
    deployed.wait_ready()
    listed = {model["id"] for model in deployed.get("/v1/models")["data"]}
    assert listed == {"glm-4-tiny", "glm", "qwen3-tiny", "qwen"}
    for model in ("glm-4-tiny", "glm", "qwen3-tiny", "qwen"):
        status, answer = deployed.ask(model)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] > 0
    with deployed.load(rate=4) as load:
        time.sleep(4)
    assert len(load.answers) >= 12
    assert not load.bad


def test_an_unknown_model_is_a_404_as_openai_says_it(deployed: Deployed) -> None:
    status, answer = deployed.ask("glm-9000")
    assert status == 404
    assert answer["error"] == {
        "message": "The model `glm-9000` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_prometheus_watches_everything(deployed: Deployed) -> None:
    wanted = {
        "vllm": {f"{host}/{name}" for host, name in INSTANCES},
        "gateway": {"demo-gw/gateway"},
        "node": {"demo-gpu-1/node", "demo-gpu-2/node", "demo-gw/node"},
    }
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = {job: deployed.targets(job) for job in wanted}
        if found == wanted:
            break
        time.sleep(1)
    assert found == wanted
    rules = deployed.get(deployed.url + ":9090/api/v1/rules")["data"]["groups"]
    assert [rule for group in rules for rule in group["rules"] if rule["health"] == "err"] == []


def test_a_serving_instance_is_sandboxed_and_runs_as_nobody_much(deployed: Deployed) -> None:
    host = deployed.bed.host("demo-gpu-1")
    verdict = host.sh("systemd-analyze security vllm@glm.service | tail -n 1").stdout
    exposure = float(verdict.split(":")[1].split()[0])
    assert exposure < 4.0, verdict
    user = host.sh("ps -o user= -p $(systemctl show -P MainPID vllm@glm)").stdout
    assert user.strip() == "vllm"
    print(verdict)


def test_no_key_is_in_an_argument_a_log_or_a_readable_file(deployed: Deployed) -> None:
    # By standard input, for sudo writes command lines into the journal.
    look = (
        "cat >/run/pattern; "
        "grep -rlF -f /run/pattern /etc /var/log /opt/vllm/lib /usr/share/vllm-fleet 2>/dev/null; "
        "ps axww -o args | grep -F -f /run/pattern; rm /run/pattern"
    )
    for name in (*GPU_HOSTS, "demo-gw"):
        found = deployed.bed.host(name).sh(look, check=False, stdin=deployed.key + "\n")
        assert found.stdout.strip() == "", f"{name}: {found.stdout}"


def test_nothing_planned_or_broken_reaches_clients_but_what_was_already_sent(
    deployed: Deployed,
) -> None:
    """kill -9 of an engine, a restart and a reboot under 5 requests a second."""
    bed, began = deployed.bed, time.time()
    first, second = bed.host("demo-gpu-1"), bed.host("demo-gpu-2")
    with deployed.load(rate=5) as load:
        time.sleep(5)
        units = first.sh("systemd-cgls -u vllm@glm.service --no-pager").stdout
        engine = re.findall(r"(\d+) VLLM::EngineCore", units)[0]
        first.sh(f"kill -9 {engine}")
        killed = time.time()  # at the latest
        time.sleep(5)
        second.sh("systemctl restart vllm@qwen.service", timeout=400)
        deployed.wait_ready()
        time.sleep(5)
        first.reboot(180)
        deployed.wait_ready(400)
        time.sleep(5)
    assert len(load.answers) > 200
    log = {line["request_id"]: line for line in deployed.access_log(began - 1)}

    # Only what had been sent to the killed engine may have broken.
    for answer in load.bad:
        line = log.get(answer.id)
        assert line is not None, f"never reached the gateway: {answer}"
        assert line["tried"].startswith("demo-gpu-1/glm:"), f"{answer}\n{line}"
        assert answer.sent <= killed, f"sent after the kill: {answer}\n{line}"
    assert len(load.bad) <= 3, load.bad

    # No answer came from an instance that was not ready.
    spells = {
        f"{host}/{name}": deployed.spells(
            host, name, ends=(killed,) if (host, name) == ("demo-gpu-1", "glm") else ()
        )
        for host, name in INSTANCES
    }
    assert len(spells["demo-gpu-1/glm"]) >= 3  # first start, after the kill, after the reboot
    assert len(spells["demo-gpu-2/qwen"]) >= 2
    checked = 0
    for answer in load.answers:
        line = log[answer.id]
        instance, _, status = line["tried"].rpartition(", ")[2].rpartition(":")
        if status != "200":
            continue
        checked += 1
        sent = line["msec"] - line["seconds"] + line["held_ms"] / 1000
        ready = any(
            begin - ROUND <= line["msec"] and sent <= end + ROUND for begin, end in spells[instance]
        )
        assert ready, f"{instance} was not ready: {line}\n{spells[instance]}"
    assert checked == len(load.answers) - len(load.bad)
    retried = [line for line in log.values() if ", " in line["tried"]]
    held = max(line["held_ms"] for line in log.values())
    print(
        f"{len(load.answers)} requests, {len(load.bad)} broken, {len(retried)} tried twice, "
        f"longest hold {held / 1000:.1f} s, longest answer "
        f"{max(a.ended - a.sent for a in load.answers):.1f} s"
    )


def test_a_flipped_byte_at_the_hub_stops_the_deploy_before_any_start(deployed: Deployed) -> None:
    deployed.wait_ready()
    # Other weights than those on the hosts: equal files are linked, not fetched.
    repository = deployed.bed.hub / "Qwen" / "qwen3-flipped"
    tiny_models.make(repository / "v1", "qwen3", seed=2)
    (repository / "revisions.json").write_text('{"v1.0": "v1"}\n')

    def add(data: dict[str, Any]) -> None:
        other = {**data["models"]["qwen3-tiny"], "aliases": [], "repo": "Qwen/qwen3-flipped"}
        data["models"]["qwen3-flipped"] = other
        data["instances"].append(
            {"name": "flipped", "hosts": ["demo-gpu-1"], "model": "qwen3-flipped", "port": 8003}
        )

    deployed.operator.change(add)
    shard = "model-00002-of-00003.safetensors"
    hub.switch(deployed.bed.hub, hub.Fault("wrong_bytes", path=shard, bytes=5000))
    try:
        done = deployed.operator.deploy()
    finally:
        hub.switch(deployed.bed.hub)
    assert done.returncode == 1
    assert shard in done.stdout
    assert "sha256" in done.stdout
    host = deployed.bed.host("demo-gpu-1")
    assert host.sh("systemctl is-active vllm@flipped", check=False).stdout.strip() == "inactive"
    assert (
        "qwen3-flipped" not in host.sh("ls /opt/vllm/models/qwen3-flipped 2>&1", check=False).stdout
    )
    deployed.wait_ready(60)  # what served goes on
    assert "qwen3-flipped" not in deployed.status()

    def take_out(data: dict[str, Any]) -> None:
        del data["models"]["qwen3-flipped"]
        data["instances"].pop()

    deployed.operator.change(take_out)
    done = deployed.operator.deploy()
    assert done.returncode == 0, done.stdout
    assert "flipped" not in host.sh("ls /etc/vllm").stdout


TOO_LONG = {"max-model-len": 999999}  # vLLM itself refuses it, nobody before does


def test_a_vllm_that_does_not_start_is_named_with_cause_and_remedy(deployed: Deployed) -> None:
    deployed.wait_ready()
    bad = {
        "name": "bad",
        "hosts": ["demo-gpu-1"],
        "model": "qwen3-tiny",
        "port": 8003,
        "vllm_args": TOO_LONG,
    }
    deployed.operator.change(lambda data: data["instances"].append(bad))
    try:
        with deployed.load(rate=3) as load:
            done = deployed.operator.deploy()
    finally:
        deployed.operator.change(lambda data: data["instances"].pop())
    assert done.returncode == 1
    assert "instance bad: failed to start" in done.stdout, done.stdout
    assert "greater than the derived max_model_len" in done.stdout
    assert re.search(r"cause: .*\n.*log line: .*max_model_len.*\n.*remedy: ", done.stdout)
    assert "Traceback" not in re.sub(r"journal \w+ \|.*", "", done.stdout)
    assert not load.bad
    ready = deployed.status()["qwen3-tiny"]
    assert ready == {"demo-gpu-1/bad": False, "demo-gpu-1/qwen": True, "demo-gpu-2/qwen": True}
    done = deployed.operator.deploy()
    assert done.returncode == 0, done.stdout
    deployed.wait_ready()


def test_an_option_that_the_engine_refuses_takes_nothing_out(deployed: Deployed) -> None:
    """What runs is asked first whether the release takes its new command line."""
    deployed.wait_ready()
    deployed.operator.change(lambda data: data["instances"][1].update(vllm_args=TOO_LONG))
    try:
        with deployed.load(rate=3) as load:
            done = deployed.operator.deploy()
    finally:
        deployed.operator.change(lambda data: data["instances"][1].pop("vllm_args"))
    assert done.returncode == 1
    assert re.search(r"qwen: \S+ refuses its options: .*derived max_model_len", done.stdout), (
        done.stdout
    )
    assert set(deployed.status()["qwen3-tiny"].values()) == {True}
    assert not load.bad
    done = deployed.operator.deploy()
    assert done.returncode == 0, done.stdout


def test_what_leaves_the_yaml_leaves_the_hosts_gateway_and_prometheus(deployed: Deployed) -> None:
    # An instance.
    deployed.operator.change(lambda data: data["instances"][1].update(hosts=["demo-gpu-1"]))
    with deployed.load(rate=5) as load:
        done = deployed.operator.deploy()
        time.sleep(3)
    assert done.returncode == 0, done.stdout
    assert not load.bad
    second = deployed.bed.host("demo-gpu-2")
    assert second.sh("systemctl is-active vllm@qwen", check=False).stdout.strip() == "inactive"
    assert "qwen" not in second.sh("ls /etc/vllm /etc/systemd/system /var/lib/vllm").stdout
    assert set(deployed.status()["qwen3-tiny"]) == {"demo-gpu-1/qwen"}

    # A model and a host, by one deploy.
    def less(data: dict[str, Any]) -> None:
        del data["models"]["qwen3-tiny"]
        del data["instances"][1]
        data["instances"][0]["hosts"] = ["demo-gpu-1"]

    deployed.operator.change(less)
    done = deployed.operator.deploy()
    assert done.returncode == 0, done.stdout
    assert deployed.status() == {"glm-4-tiny": {"demo-gpu-1/glm": True}}
    assert {model["id"] for model in deployed.get("/v1/models")["data"]} == {"glm-4-tiny", "glm"}
    status, _ = deployed.ask("qwen3-tiny")
    assert status == 404
    for name in GPU_HOSTS:
        left = (
            deployed.bed.host(name)
            .sh("systemctl list-units --plain --no-legend 'vllm@*'; ls /etc/vllm /var/lib/vllm")
            .stdout
        )
        assert "qwen" not in left
        assert ("glm" in left) == (name == "demo-gpu-1")
    deadline = time.monotonic() + 60
    while deployed.targets("vllm") != {"demo-gpu-1/glm"} and time.monotonic() < deadline:
        time.sleep(1)
    assert deployed.targets("vllm") == {"demo-gpu-1/glm"}
    assert deployed.ask("glm")[0] == 200
    done = deployed.operator.deploy()
    assert "everything on them is as wanted" in done.stdout
    assert changes(done.stdout) == {}
