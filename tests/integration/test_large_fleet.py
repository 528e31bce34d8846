"""Files for 500 hosts and 4,000 instances, as nginx and promtool themselves take them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.stubs.gateway import Nginx, available
from tests.unit import large
from vllm_fleet import gateway
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import read_inputs
from vllm_fleet.spec.load import load_fleet

pytestmark = [pytest.mark.integration]
INSTANCES = 4000


@pytest.fixture(scope="module")
def gateway_plan(tmp_path_factory: pytest.TempPathFactory) -> HostPlan:
    """What the first gateway of the fleet gets; it is the monitor, too."""
    root = tmp_path_factory.mktemp("large")
    large.write_files(root, 500 + len(large.GATEWAYS))
    fleet = load_fleet(str(root / "inventory" / "prod.py"))
    plans = plan_fleet(fleet, large.bare(fleet), read_inputs(fleet))
    assert sum(len(plan.instances) for plan in plans.values()) == INSTANCES
    return plans[f"{large.PREFIX}gw-1"]


@pytest.fixture
def nginx() -> Iterator[Nginx]:
    if not available():
        pytest.skip("nginx with its Lua module, and root, are needed")
    one = Nginx(*free_ports(2))
    yield one
    one.stop()


def test_nginx_accepts_the_gateway_of_the_fleet(gateway_plan: HostPlan, nginx: Nginx) -> None:
    files = [f for f in gateway_plan.files if f.path.startswith(("/etc/nginx/", gateway.LUA))]
    nginx.put(files)
    nginx.check()
    pools = json.loads((nginx.root / gateway.ETC.lstrip("/") / "pools.json").read_text())
    text = json.dumps(pools)
    assert text.count('"host"') >= INSTANCES


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_the_targets_and_rules_of_the_fleet(
    gateway_plan: HostPlan, tmp_path: Path
) -> None:
    for file in gateway_plan.files:
        if file.path.startswith("/etc/prometheus/"):
            path = tmp_path / file.path.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.content.replace("/etc/prometheus", f"{tmp_path}/etc/prometheus"))
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "etc/prometheus/vllm-fleet.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    targets = json.loads((tmp_path / "etc/prometheus/vllm-fleet/targets/vllm.json").read_text())
    assert sum(len(group["targets"]) for group in targets) == INSTANCES
