"""bench.py with the real vLLM on CPU: two configurations of one instance, by the normal path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rolling import RollingFleet, deployed
from tests.integration.rolling_engine import NEW, one_pool
from tests.integration.test_bench import bench, running
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

FILE = """\
load: {input: 256, output: 32, streams: [1, 4], requests: 3, seconds: 600s}
configurations:
  as it is: {}
  small steps: {vllm_args: {max-num-batched-tokens: 128, enable-chunked-prefill: true}}
"""


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Two engines of one pool."""
    with deployed(one_pool(empty_bed, tmp_path_factory.mktemp("real")), NEW) as fleet:
        yield fleet


def test_two_configurations_counted_as_the_engine_counts(
    fleet: RollingFleet, guidellm: str, tmp_path: Path
) -> None:
    mine = fleet.instances[0]
    before = running(fleet, mine)
    said = bench(fleet, guidellm, tmp_path, mine, FILE)
    print(said)
    assert said.startswith("0\n"), said
    assert running(fleet, mine) == before
    data = json.loads((tmp_path / "result.json").read_text())["results"]
    assert [one["name"] for one in data] == ["as it is", "small steps"]
    for one in data:
        assert one["start"]["kv_cache_tokens"] > 0
        for level in one["levels"]:
            # The probes of the host's own timer are answered meanwhile: the engine counts them.
            assert level["success"] == 1.0
            # GuideLLM 0.8.1 may tell nothing of one request: then this is said.
            lost = f"At {level['streams']} streams GuideLLM tells of 19 of 20 requests"
            asked = 19 if any(note.startswith(lost) for note in one["notes"]) else 20
            assert level["answered"] == asked
            assert level["tokens_out"] == asked * 32
            assert level["engine"]["tokens_out"] >= level["tokens_out"]
            assert level["engine"]["tokens_in"] >= level["tokens_in"]
