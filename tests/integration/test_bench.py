"""bench.py on real hosts: an instance in several configurations, and back as it was.

The engine is the stand-in; SSH, gateway, units and the load of GuideLLM are real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rolling import (
    INSTANCES,
    MANY,
    ONE,
    RollingFleet,
    deployed,
    make,
    told,
)
from tests.testbed.bed import Bed

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FILE = """\
load: {input: 32, output: 16, streams: [1, 4], requests: 4}
configurations:
  as it is: {}
  fewer at once: {vllm_args: {max-num-seqs: 2}}
"""


@pytest.fixture(scope="module")
def fleet(empty_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingFleet]:
    """Three hosts that serve."""
    fleet = make(empty_bed, tmp_path_factory.mktemp("bench"))
    with deployed(fleet, "0.31.0"):
        yield fleet


def bench(fleet: RollingFleet, guidellm: str, out: Path, instance: str, file: str = FILE) -> str:
    """Run bench.py; what it said, with its exit code first."""
    path = fleet.operator.root / "configurations.yml"
    path.write_text(file)
    asked = {
        "instance": instance,
        "configurations": str(path),
        "out": str(out),
        "generator": guidellm,
    }
    flags = [word for key, value in asked.items() for word in ("--data", f"{key}={value}")]
    done = fleet.run("bench.py", *flags)
    return f"{done.returncode}\n{done.stdout}"


def running(fleet: RollingFleet, instance: str) -> str:
    """The command line that an instance runs with, and the checksum of its files."""
    host, _, name = instance.partition("/")
    look = f"tr '\\0' ' ' </proc/$(systemctl show -P MainPID vllm@{name})/cmdline"
    return fleet.bed.host(host).sh(f"{look}; cat /var/lib/vllm/{name}/running").stdout


def test_configurations_are_measured_and_nobody_loses_a_request(
    fleet: RollingFleet, guidellm: str, tmp_path: Path
) -> None:
    mine = INSTANCES[0]
    before = running(fleet, mine)
    with fleet.watched(rate=3) as watched:
        said = bench(fleet, guidellm, tmp_path, mine)
    assert said.startswith("0\n"), said
    assert running(fleet, mine) == before
    assert fleet.record(mine)["step"] is None
    assert not watched.load.bad, told(watched.load.bad)
    assert watched.most_out(MANY) == 1
    assert fleet.answers_while_out(watched) == []
    data = json.loads((tmp_path / "result.json").read_text())["results"]
    assert [one["name"] for one in data] == ["as it is", "fewer at once"]
    for one in data:
        assert [level["streams"] for level in one["levels"]] == [1, 4]
        for level in one["levels"]:
            assert (level["success"], level["answered"]) == (1.0, 20)
            assert level["tokens_out"] == 20 * 16
    assert "fewer at once" in (tmp_path / "report.html").read_text()
    line = fleet.audit()[-1]
    assert (line["instance"], line["what"], line["result"]) == ("a", "bench.py", "done")
    # The next deploy finds nothing to do for it.
    done = fleet.run("deploy.py")
    assert done.returncode == 0, done.stdout
    assert running(fleet, mine) == before


def test_the_last_instance_of_a_pool_is_refused(
    fleet: RollingFleet, guidellm: str, tmp_path: Path
) -> None:
    (mine,) = [one for one in INSTANCES if one.endswith("/c")]
    before = running(fleet, mine)
    said = bench(fleet, guidellm, tmp_path, mine)
    assert said.startswith("1\n"), said
    assert f"it is the last ready instance of pool {ONE}" in said
    assert running(fleet, mine) == before


def test_what_cannot_be_planned_is_refused_before_anything(
    fleet: RollingFleet, guidellm: str, tmp_path: Path
) -> None:
    wrong = "configurations: {a: {}, b: {vllm_args: {max-num-sequences: 4}}}"
    said = bench(fleet, guidellm, tmp_path, INSTANCES[0], wrong)
    assert not said.startswith("0\n")
    assert "nothing was changed" in said
    said = bench(fleet, guidellm, tmp_path, "roll-9/z")
    assert "no instance roll-9/z takes part; there is roll-3/a" in said
