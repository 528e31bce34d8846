"""A frozen engine on a real host: out of rotation, its stacks saved, restarted, serving again.

The engine is a stand-in that hangs while its engine process is stopped (SIGSTOP); the units, the
gate, the probe and the gateway are the real ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration import probed
from tests.integration.probed import Pair
from tests.testbed.bed import Bed

pytestmark = [
    pytest.mark.long,
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def pair(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with probed.pair(bed, tmp_path_factory.mktemp("probe")) as found:
        yield found


def test_a_frozen_engine_is_out_in_thirty_seconds_and_serves_again_by_itself(pair: Pair) -> None:
    probed.freeze_and_watch(pair, 120)


def test_a_saturated_engine_is_not_taken_for_a_frozen_one(pair: Pair) -> None:
    """Every place is taken for longer than the probe waits, and tokens come out."""
    pair.wait(60, lambda: pair.metric("vllm_fleet_probe_success", "b") == 1)
    before = pair.metric("vllm_fleet_probe_restarts_total", "b")
    token = pair.host.sh("cat /run/vllm/b/token").stdout.strip()
    body = json.dumps({"model": "glm-4-tiny", "max_tokens": 1900, "messages": []})
    command = (
        f"for i in $(seq 20); do curl -s -m 80 -o /dev/null -H 'X-Fleet-Token: {token}' "
        f"-H 'Content-Type: application/json' -d '{body}' "
        "http://127.0.0.1:8002/v1/chat/completions & done; wait"
    )
    load = threading.Thread(target=lambda: pair.host.sh(command))
    load.start()
    pair.wait(60, lambda: pair.metric("vllm_fleet_probe_success", "b") == 0)
    failed = time.monotonic()
    while time.monotonic() < failed + 10:
        assert pair.ready("b")
        time.sleep(1)
    load.join()
    assert pair.metric("vllm_fleet_probe_restarts_total", "b") == before
    pair.wait(60, lambda: pair.metric("vllm_fleet_probe_success", "b") == 1)


def test_the_last_ready_one_is_left_and_told(pair: Pair) -> None:
    pair.host.sh("systemctl stop vllm@a")
    pair.wait(60, lambda: pair.metric("vllm_fleet_probe_success", "b") == 1)
    engine = pair.pid("b", "VLLM::EngineCore")
    pair.host.sh(f"kill -STOP {engine}")
    try:
        pair.wait(60, lambda: "left as it is" in pair.host.sh(
            "journalctl -u vllm-fleet-probe --since -40s --no-pager").stdout)  # fmt: skip
        assert pair.ready("b")
    finally:
        pair.host.sh(f"kill -CONT {engine}")
        pair.host.sh("systemctl start --no-block vllm@a")
    pair.wait(60, lambda: pair.metric("vllm_fleet_probe_success", "b") == 1)
