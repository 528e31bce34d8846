"""The real vLLM, watched: every panel and rule has data, and a frozen engine is dealt with."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration import probed
from tests.integration.probed import Pair
from tests.testbed.bed import Bed
from tools.unanswered import Found, Prometheus, unanswered

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(1200)]

# What one host with a pool that is well does not bring about.
NOT_YET = {
    "vllm_fleet_change_timestamp_seconds",
    "vllm_fleet_change_until_seconds",
    "vllm_fleet_gateway_refused_total",
    "vllm_fleet_gateway_requests_total",  # with a status of failure
    "vllm_fleet_xid_time_seconds",
}


@pytest.fixture(scope="module")
def pair(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    empty_bed.up([], uplink=False)  # hub and wheels
    with probed.pair(empty_bed, tmp_path_factory.mktemp("probe"), stand_in=False) as found:
        yield found


def test_no_panel_and_no_rule_is_without_data(pair: Pair) -> None:
    pair.wait(300, lambda: pair.ready("a") and pair.ready("b"))
    prometheus = Prometheus(f"http://{pair.host.address}:9090")
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            pair.chat(60)
            time.sleep(0.5)

    clients = [threading.Thread(target=client) for _ in range(2)]
    for thread in clients:
        thread.start()
    found, until = Found(), time.monotonic() + 180
    try:
        while time.monotonic() < until:
            time.sleep(10)
            found = unanswered(prometheus, 60)
            if not found.empty:
                break
    finally:
        over.set()
        for thread in clients:
            thread.join()
    assert found.empty == []
    assert found.panels > 80
    assert set(re.findall(r": (vllm_fleet_\w+)", "\n".join(found.not_yet))) <= NOT_YET
    assert set(re.findall(r"\(no (.+)\)", "\n".join(found.not_here))) == {
        "cards",
        "InfiniBand",
        "Alertmanager of ours",
        "certificate of a gateway",
    }
    print(f"{found.panels} queries, {found.variables} variables, {found.rules} rules: all answered")


def test_a_frozen_engine_is_out_in_thirty_seconds_and_serves_again_by_itself(pair: Pair) -> None:
    probed.freeze_and_watch(pair, 400)
