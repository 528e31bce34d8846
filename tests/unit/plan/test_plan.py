"""Spec and states in, the wanted state of every host out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleets import ALL, fleet, settled, states, unit
from vllm_fleet import exam, gateway
from vllm_fleet.gateway import keepalived
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.placement import Placed, Placement
from vllm_fleet.plan import Refusal, asked, bundled_packages, placement_of, plan_fleet
from vllm_fleet.spec.inputs import Inputs, read_inputs


def plans(root: Path, inputs: Inputs | None = None, **changes: Any) -> dict[str, HostPlan]:
    found = fleet(root)
    return plan_fleet(found, states(found, **changes), inputs or Inputs())


def test_every_host_gets_its_part(tmp_path: Path) -> None:
    found = plans(tmp_path)
    assert list(found) == ["gpu-1", "gpu-2", "gw-1"]
    assert [i.name for i in found["gpu-1"].instances] == ["glm-a", "qwen-a"]
    assert [i.uuids for i in found["gpu-1"].instances] == [
        ("GPU-0000", "GPU-1111"),
        ("GPU-2222",),
    ]
    assert [i.name for i in found["gpu-2"].instances] == ["glm-a"]
    assert not found["gw-1"].instances
    assert {"gcc", "python3-dev", "ninja-build"} <= set(found["gpu-1"].packages)
    assert "prometheus" in found["gw-1"].packages
    assert "gcc" not in found["gw-1"].packages
    routed = next(f for f in found["gw-1"].files if f.path == "/etc/nginx/conf.d/vllm-fleet.conf")
    assert "10.0.0.2:8001" in routed.content
    assert len({r.id for p in found.values() for r in p.releases}) == 1


def test_a_host_that_is_as_wanted_needs_nothing(tmp_path: Path) -> None:
    first = plans(tmp_path)
    changes = {name.replace("-", "_"): settled(plan) for name, plan in first.items()}
    for plan in plans(tmp_path, **changes).values():
        assert not plan.missing_packages
        assert not plan.changed_files
        assert not plan.removed_files
        assert not plan.missing_releases
        assert all(w.present for w in plan.weights)
        assert not plan.to_start()
        assert not plan.to_restart()
        assert not plan.retired
        assert all("Grafana: no package source" in notice for notice in plan.notices)


def test_a_process_with_old_settings_is_restarted_also_when_the_files_are_new(
    tmp_path: Path,
) -> None:
    changes = settled(plans(tmp_path)["gpu-1"])
    changes["instances"]["glm-a"]["running"] = "of another configuration"
    plan = plans(tmp_path, gpu_1=changes)["gpu-1"]
    assert not plan.changed_files
    assert [i.name for i in plan.to_restart()] == ["glm-a"]
    assert not plan.to_start()


@pytest.mark.parametrize(
    "how", [{"active": "failed"}, {"active": "activating"}, {"enabled": "disabled"}]
)
def test_what_does_not_run_or_would_not_at_boot_is_started(
    tmp_path: Path, how: dict[str, str]
) -> None:
    changes = settled(plans(tmp_path)["gpu-1"])
    changes["units"]["vllm@qwen-a.service"] = unit(**how)
    plan = plans(tmp_path, gpu_1=changes)["gpu-1"]
    assert [i.name for i in plan.to_start()] == ["qwen-a"]
    assert not plan.to_restart()


def test_a_running_instance_stays_on_its_release(tmp_path: Path) -> None:
    changes = settled(plans(tmp_path)["gpu-1"])
    (tmp_path / "group_vars").mkdir(exist_ok=True)
    newer = ALL.replace("0.32.0", "0.33.0")
    found = fleet(tmp_path, all=newer)
    plan = plan_fleet(found, states(found, gpu_1=changes), Inputs())["gpu-1"]
    assert {i.release for i in plan.instances} == {"0.32.0-open"}
    assert [r.id for r in plan.missing_releases] == ["0.33.0-open"]  # staged
    assert not plan.to_restart()
    assert "upgrade.py" in plan.notices[0]


def test_what_left_the_spec_is_retired_and_its_files_removed(tmp_path: Path) -> None:
    changes = settled(plans(tmp_path)["gpu-1"])
    less = ALL[: ALL.index("  - {name: qwen-a")].replace("  qwen:", "  # qwen:")
    found = fleet(tmp_path, all=less)
    every = plan_fleet(found, states(found, gpu_1=changes), Inputs())
    plan = every["gpu-1"]
    assert plan.retired == ("qwen-a",)
    assert "/etc/vllm/qwen-a.env" in plan.removed_files
    assert all("qwen-a" in path for path in plan.removed_files)
    assert not any("8002" in f.content for f in every["gw-1"].files)


def test_an_instance_that_is_only_a_file_is_retired_too(tmp_path: Path) -> None:
    changes = {"instances": {"old": {"running": "", "ready": False, "release": ""}}}
    assert plans(tmp_path, gpu_2=changes)["gpu-2"].retired == ("old",)


def test_lost_weights_are_fetched_again(tmp_path: Path) -> None:
    changes = settled(plans(tmp_path)["gpu-1"])
    for stamp in changes["weights"].values():
        stamp["intact"] = stamp["repo"] != "Qwen/Qwen3-8B"
    plan = plans(tmp_path, gpu_1=changes)["gpu-1"]
    assert [w.name for w in plan.weights if not w.present] == ["qwen"]


def test_a_file_changed_by_hand_or_with_another_owner_is_put_again(tmp_path: Path) -> None:
    changes = settled(plans(tmp_path)["gpu-1"])
    changes["files"]["/etc/vllm/glm-a.env"][3] = "root"
    del changes["files"]["/etc/vllm/glm-a.sh"]
    plan = plans(tmp_path, gpu_1=changes)["gpu-1"]
    assert {f.path for f in plan.changed_files} == {"/etc/vllm/glm-a.env", "/etc/vllm/glm-a.sh"}


FOREIGN = {"pid": 77, "user": "bob", "command": "python train.py", "unit": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"user": "ops"}, ("gpu-1", "ops", "_sudo")),
        ({"systemd": False, "init": "tini"}, ("gpu-1", "tini", "systemd")),
        (
            {"os": {"id": "debian", "version": "11", "name": "Debian GNU/Linux 11"}},
            ("gpu-1", "Debian GNU/Linux 11", "Debian 12"),
        ),
        (
            {"os": {"id": "rocky", "version": "9.4", "name": "Rocky Linux 9.4"}},
            ("Rocky Linux 9.4", "Ubuntu 22.04"),
        ),
        (
            {"listening": {"8002": FOREIGN}},
            ("gpu-1", "port 8002", "qwen-a", "pid 77 of bob", "train.py", "another port"),
        ),
        (
            {"cards": {"present": True, "error": "Driver/library version mismatch", "csv": ""}},
            ("gpu-1", "nvidia-smi", "mismatch"),
        ),
        ({"cards": {"present": False, "error": None, "csv": ""}}, ("no NVIDIA driver", "device")),
        (
            {"disks": {"/opt/vllm": {"free_mib": 3 * 1024, "device": 1}}},
            ("gpu-1", "/opt/vllm", "3.0 GiB", "17.4 GiB"),
        ),
    ],
)
def test_a_host_that_is_not_fit_is_refused_with_place_and_remedy(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(Refusal) as refusal:
        plans(tmp_path, gpu_1=changes)
    for word in words:
        assert word in str(refusal.value)


def test_a_card_that_is_missing_or_held_is_named(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    all_states = states(found)
    csv = "\n".join(all_states["gpu-1"].cards["csv"].splitlines()[:3])
    held = {"uuid": "GPU-0000", **FOREIGN}
    all_states["gpu-1"] = replace(
        all_states["gpu-1"],
        cards={"present": True, "error": None, "csv": csv, "holders": [held]},
    )
    with pytest.raises(Refusal) as refusal:
        plan_fleet(found, all_states, Inputs())
    first, second = refusal.value.reasons
    assert "card 0 of instance glm-a is held by pid 77 of bob" in first
    assert "qwen-a wants card 2; nvidia-smi lists 0, 1" in second


def test_a_count_and_kind_of_cards_becomes_indices_and_a_line_to_write_down(
    tmp_path: Path,
) -> None:
    found = fleet(tmp_path, all=ALL.replace("cards: [2]", "cards: 1 x L40S"))
    every = plan_fleet(found, states(found), Inputs(placement=Placement("placement/prod.yml")))
    assert [i.cards for i in every["gpu-1"].instances] == [(0, 1), (2,)]
    assert every["gpu-1"].instances[1].uuids == ("GPU-2222",)
    written = placement_of(every, Inputs())
    assert written == {("gpu-1", "qwen-a"): Placed("1 x L40S", (2,), ("GPU-2222",))}
    later = Inputs(placement=Placement("placement/prod.yml", written))
    again = plan_fleet(found, states(found), later)
    assert placement_of(again, later) is None
    assert again["gpu-1"].checksums == every["gpu-1"].checksums


def test_a_prometheus_of_somebody_is_left_as_it_is(tmp_path: Path) -> None:
    text = "scrape_configs:\n- job_name: mine\n  static_configs: [{targets: ['db:9187']}]\n"
    plan = plans(tmp_path, gw_1={"texts": {"/etc/prometheus/prometheus.yml": text}})["gw-1"]
    ours = {f.path for f in plan.files}
    assert "/etc/prometheus/vllm-fleet/scrape.yml" in ours
    assert "/etc/prometheus/vllm-fleet.yml" not in ours
    assert not any("prometheus.service.d" in path for path in ours)
    assert any("job 'mine'" in notice for notice in plan.notices)


def test_a_flag_that_the_node_exporter_would_get_twice_is_refused(tmp_path: Path) -> None:
    text = 'ARGS="--collector.textfile.directory=/srv/prom"\n'
    with pytest.raises(Refusal, match=r"gpu-2: .*node-exporter: ARGS: --collector\.textfile"):
        plans(tmp_path, gpu_2={"texts": {"/etc/default/prometheus-node-exporter": text}})


def test_grafana_comes_from_the_source_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "grafana.asc").write_text("-----BEGIN PGP PUBLIC KEY BLOCK-----\n")
    source = "deb [signed-by=/etc/apt/keyrings/grafana.asc] http://mirror.lan/grafana stable main"
    found = fleet(
        tmp_path,
        monitoring=f"monitoring: {{grafana: {{apt_source: '{source}', "
        "key_file: files/grafana.asc}}\n",
    )
    plan = plan_fleet(found, states(found), read_inputs(found))["gw-1"]
    files = {f.path: f.content for f in plan.files}
    assert "grafana" in plan.packages
    assert source in files["/etc/apt/sources.list.d/vllm-fleet-grafana.list"]
    assert "BEGIN PGP" in files["/etc/apt/keyrings/grafana.asc"]
    assert any(s.unit == "grafana-server.service" for s in plan.monitoring_services)
    assert not plan.notices


def test_new_keys_alone_reload_no_gateway(tmp_path: Path) -> None:
    """nginx's workers read keys.json themselves, and a reload makes new workers."""

    def routed(keys: str) -> tuple[str, str]:
        (tmp_path / "keys.yml").write_text(keys)
        found = fleet(tmp_path, gateway="api_keys: {file: keys.yml}\n")
        plan = plan_fleet(found, states(found), read_inputs(found))["gw-1"]
        (file,) = [file for file in plan.files if file.path == gateway.KEYS]
        return file.content, plan.gateway_services[0].reloads

    before, after = routed("- {name: a, key: x}\n"), routed("- {name: a, key: y}\n")
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_every_host_is_told_of_at_once(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refusal:
        plans(tmp_path, gpu_1={"user": "ops"}, gw_1={"listening": {"80": FOREIGN}})
    assert len(refusal.value.reasons) == 2


def test_our_own_processes_on_ports_and_cards_are_no_reason(tmp_path: Path) -> None:
    ours = {"pid": 5, "user": "vllm", "command": "vllm serve", "unit": "vllm@qwen-a.service"}
    nginx = {"pid": 6, "user": "root", "command": "nginx", "unit": "nginx.service"}
    assert plans(tmp_path, gpu_1={"listening": {"8002": ours}}, gw_1={"listening": {"80": nginx}})


def test_a_host_that_takes_no_part_is_still_routed_to(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    some = states(found)
    del some["gpu-2"]
    every = plan_fleet(found, some, Inputs())
    assert list(every) == ["gpu-1", "gw-1"]
    assert any("10.0.0.2:8001" in f.content for f in every["gw-1"].files)


def test_what_a_renderer_refuses_names_the_host(tmp_path: Path) -> None:
    found = fleet(tmp_path, all=ALL.replace("10.0.0.2", "gpu-2"))
    hosts = tuple(
        h.model_copy(update={"address": "gpu-2.lan"}) if h.name == "gpu-2" else h
        for h in found.hosts
    )
    unresolved = found.model_copy(update={"hosts": hosts})
    with pytest.raises(Refusal, match=r"gpu-2.*gpu-2\.lan"):
        plan_fleet(unresolved, states(unresolved), Inputs())


TWO_GATEWAYS = """\
gpu = [("gpu-1", {"ssh_hostname": "10.0.0.1"}), ("gpu-2", {"ssh_hostname": "10.0.0.2"})]
gateway = [("gw-1", {"ssh_hostname": "10.0.0.9"}), ("gw-2", {"ssh_hostname": "10.0.0.8"})]
monitoring = ["gw-1"]
"""


def test_gateways_that_share_an_address_get_keepalived_and_are_both_watched(
    tmp_path: Path,
) -> None:
    (tmp_path / "vrrp.password").write_text("s3cret\n")
    found = fleet(
        tmp_path,
        inventory=TWO_GATEWAYS,
        gateway='gateway: {keepalived: {address: "10.0.0.100/24", password_file: vrrp.password}}\n',
    )
    nics = {
        f"gw_{n}": {"nics": {"eth0": {"addresses": [f"10.0.0.{a}/24"]}}}
        for n, a in ((1, 9), (2, 8))
    }
    inputs = read_inputs(found)
    planned = plan_fleet(found, states(found, **nics), inputs)
    for name, priority, peer in (("gw-1", 200, "10.0.0.8"), ("gw-2", 199, "10.0.0.9")):
        plan = planned[name]
        assert {"keepalived", "curl"} <= set(plan.packages)
        conf = next(f.content for f in plan.files if f.path == keepalived.CONF)
        assert f"priority {priority}\n" in conf
        assert f"        {peer}\n" in conf
        assert "auth_pass s3cret\n" in conf
        assert [s.unit for s in plan.gateway_services] == ["nginx.service", keepalived.UNIT]
    targets = next(f for f in planned["gw-1"].files if f.path.endswith("/targets/gateway.json"))
    assert [t["targets"] for t in json.loads(targets.content)] == [
        ["10.0.0.9:9145"],
        ["10.0.0.8:9145"],
    ]
    # what is as wanted needs nothing; when it is wanted no more, it is stopped before it goes
    changes = settled(planned["gw-2"]) | nics["gw_2"]
    again = plan_fleet(found, states(found, gw_1=nics["gw_1"], gw_2=changes), inputs)["gw-2"]
    assert not again.changed_files
    alone = fleet(tmp_path, inventory=TWO_GATEWAYS, gateway="gateway: {}\n")
    plan = plan_fleet(alone, states(alone, gw_2=changes), Inputs())["gw-2"]
    assert [s.unit for s in plan.gateway_services] == ["nginx.service"]


def test_a_gateway_whose_interface_is_not_found_is_refused(tmp_path: Path) -> None:
    found = fleet(tmp_path, gateway='gateway: {keepalived: {address: "10.0.0.100/24"}}\n')
    with pytest.raises(Refusal, match=r"gw-1: gateway\.keepalived\.interface: no interface"):
        plan_fleet(found, states(found), Inputs())


ACME = "gateway: {listen: 443, tls: {acme: {email: a@b.c, domains: [llm.example.com]}}}\n"


def test_a_certificate_is_fetched_once_and_again_for_other_names(tmp_path: Path) -> None:
    found = fleet(tmp_path, gateway=ACME)
    plan = plan_fleet(found, states(found), Inputs())["gw-1"]
    assert {"certbot", "openssl"} <= set(plan.packages)
    assert "certbot.timer" in [s.unit for s in plan.gateway_services]
    wanted = plan.missing_certificate
    assert wanted is not None
    there = {"loaded": {wanted.name: wanted.checksum}}
    again = plan_fleet(found, states(found, gw_1=there), Inputs())["gw-1"]
    assert again.acme == wanted
    assert again.missing_certificate is None
    found = fleet(tmp_path, gateway=ACME.replace("[llm", "[chat.example.com, llm"))
    other = plan_fleet(found, states(found, gw_1=there), Inputs())["gw-1"]
    assert other.missing_certificate is not None


def test_the_port_of_the_proof_must_be_free(tmp_path: Path) -> None:
    found = fleet(tmp_path, gateway=ACME)
    held = {"pid": 7, "user": "root", "command": "apache2", "unit": "apache2.service"}
    with pytest.raises(Refusal, match="port 80 of the proof for the gateway's certificate is take"):
        plan_fleet(found, states(found, gw_1={"listening": {"80": held}}), Inputs())


def test_a_certificate_on_the_host_is_watched_by_a_unit_of_its_own(tmp_path: Path) -> None:
    tls = "gateway: {listen: 443, tls: {host_certificate: /etc/a.pem, host_key: /etc/a.key}}\n"
    found = fleet(tmp_path, gateway=tls)
    plan = plan_fleet(found, states(found), Inputs())["gw-1"]
    nginx, watch = plan.gateway_services
    assert (nginx.unit, watch.unit) == ("nginx.service", "vllm-fleet-tls.path")
    assert watch.restarts
    assert plan.acme is None


def test_a_bundle_holds_every_package_that_a_deploy_may_want() -> None:
    looked_at = set(json.loads(asked())["packages"])
    # Drivers are the operator's own, and Grafana is in no Debian.
    assert looked_at - set(bundled_packages()) == {*exam.PACKAGES, "grafana"}
