"""Memory and settings of instances: applied only where they cannot change by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.cards.made import matrix, uniform
from tests.unit.fleets import ALL, fleet, state, states
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.overview import overview
from vllm_fleet.plan import plan_fleet
from vllm_fleet.spec.inputs import Inputs, read_inputs
from vllm_fleet.survey import HostView, survey

# Qwen3-8B's published numbers.
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GLM_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
ON_HOST = {
    "weights": {
        "/opt/vllm/models/qwen/v2/.verified.json": {
            "source": "modelscope",
            "repo": "Qwen/Qwen3-8B",
            "revision": "v2",
            "passed": ["tokenizer", "chat_template"],
            "intact": True,
            "config": json.dumps(QWEN),
        }
    }
}


def inputs(root: Path, text: str = ALL, **configs: dict[str, Any]) -> Inputs:
    found = fleet(root, all=text)
    (root / "configs").mkdir(exist_ok=True)
    for name, config in configs.items():
        revision = {"qwen": "v2", "glm": "v1"}[name]
        (root / "configs" / f"{name}@{revision}.json").write_text(json.dumps(config))
    return read_inputs(found)


def view(root: Path, given: Inputs, text: str = ALL, **changes: Any) -> HostView:
    found = fleet(root, all=text)
    return survey(found, states(found, gpu_1=changes), given)["gpu-1"]


def plans(root: Path, given: Inputs, text: str = ALL, **changes: Any) -> dict[str, HostPlan]:
    found = fleet(root, all=text)
    return plan_fleet(found, states(found, gpu_1=changes), given)


def test_a_config_beside_group_vars_decides_settings_that_the_launch_script_has(
    tmp_path: Path,
) -> None:
    given = inputs(tmp_path, qwen=QWEN)
    sized = view(tmp_path, given).sized["qwen-a"]
    assert sized.applied
    assert sized.sizing is not None
    assert 15 < sized.sizing.weights_gib < 16
    plan = plans(tmp_path, given)["gpu-1"]
    script = next(f.content for f in plan.files if f.path == "/etc/vllm/qwen-a.sh")
    assert "--gpu-memory-utilization" in script
    assert f"--max-model-len {sized.sizing.max_model_len}" in script
    expected = next(f for f in plan.files if f.path == "/etc/vllm/qwen-a.plan.json")
    assert json.loads(expected.content)["kv_cache_tokens"] == sized.sizing.kv_cache_tokens


def test_the_operator_s_own_value_wins(tmp_path: Path) -> None:
    text = ALL.replace("port: 8002", "port: 8002, vllm_args: {gpu_memory_utilization: 0.5}")
    given = inputs(tmp_path, text, qwen=QWEN)
    sized = view(tmp_path, given, text).sized["qwen-a"]
    assert sized.choices is not None
    assert sized.choices["gpu-memory-utilization"] == 0.5
    assert "gpu-memory-utilization" not in sized.args
    plan = plans(tmp_path, given, text)["gpu-1"]
    script = next(f.content for f in plan.files if f.path == "/etc/vllm/qwen-a.sh")
    assert script.count("gpu-memory-utilization") == 1
    assert "--gpu-memory-utilization 0.5" in script


def test_a_config_that_appears_on_the_host_changes_nothing(tmp_path: Path) -> None:
    before = plans(tmp_path, Inputs())["gpu-1"]
    after = plans(tmp_path, Inputs(), **ON_HOST)["gpu-1"]
    assert after.checksums == before.checksums
    assert [f.path for f in after.files] == [f.path for f in before.files]
    sized = view(tmp_path, Inputs(), **ON_HOST).sized["qwen-a"]
    assert sized.source == "the weights on gpu-1"
    assert not sized.applied
    assert not sized.args
    assert sized.sizing is not None  # of what vLLM does by itself
    assert sized.sizing.max_model_len == 40960


def test_weights_of_another_revision_or_damaged_ones_tell_nothing(tmp_path: Path) -> None:
    for change in ({"revision": "v1"}, {"intact": False}, {"config": None}):
        path, stamp = next(iter(ON_HOST["weights"].items()))
        found = view(tmp_path, Inputs(), weights={path: {**stamp, **change}}).sized["qwen-a"]
        assert found.sizing is None
        assert "configs/qwen@v2.json" in found.why_not


def test_use_of_the_card_by_the_running_instance_does_not_change_its_settings(
    tmp_path: Path,
) -> None:
    given = inputs(tmp_path, qwen=QWEN)
    idle = plans(tmp_path, given)["gpu-1"]
    cards = state().cards
    full = cards["csv"].replace("46068 MiB, 4 MiB", "46068 MiB, 41000 MiB")
    holders = [
        {
            "uuid": f"GPU-{i}{i}{i}{i}",
            "pid": 5,
            "user": "vllm",
            "command": "VLLM::Worker",
            "unit": "vllm@qwen-a.service",
            "memory_mib": 40900,
        }
        for i in range(4)
    ]
    busy = plans(tmp_path, given, cards={**cards, "csv": full, "holders": holders})["gpu-1"]
    assert busy.checksums == idle.checksums


def test_a_model_that_does_not_fit_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    large = {**QWEN, "num_hidden_layers": 360}
    found = view(tmp_path, inputs(tmp_path, qwen=large))
    (reason,) = found.reasons
    assert reason.startswith("gpu-1: instance qwen-a: ")
    assert "weights" in reason


def test_what_vllm_would_refuse_is_refused_where_the_config_is_known(tmp_path: Path) -> None:
    linked = {**state().cards, "topo": matrix(uniform(4, "NV12"))}
    text = ALL.replace("port: 8001", "port: 8001, vllm_args: {tensor-parallel-size: 2}")
    given = inputs(tmp_path, text, glm={**QWEN, "num_attention_heads": 31})
    (reason,) = view(tmp_path, given, text, cards=linked).reasons
    assert "instance glm-a: " in reason
    assert "divide" in reason


def test_the_operator_s_mtp_is_counted_where_no_setting_is_chosen(tmp_path: Path) -> None:
    mtp = {**QWEN, **GLM_MOE}
    told = json.loads(json.dumps(ON_HOST))
    told["weights"]["/opt/vllm/models/qwen/v2/.verified.json"]["config"] = json.dumps(mtp)
    asked = "port: 8002, vllm_args: {speculative-config: {method: mtp, num_speculative_tokens: 1}}"
    text = ALL.replace("port: 8002", asked)
    plain = view(tmp_path, Inputs(), **told).sized["qwen-a"].sizing
    found = view(tmp_path, Inputs(), text, **told).sized["qwen-a"].sizing
    assert plain is not None
    assert found is not None
    assert found.weights_gib > plain.weights_gib + 0.1


def test_settings_never_follow_from_links_that_were_not_read(tmp_path: Path) -> None:
    given = inputs(tmp_path, glm=QWEN)
    cards = {**state().cards, "topo": ""}
    (reason,) = view(tmp_path, given, cards=cards).reasons
    assert "instance glm-a: how its cards are linked is not known" in reason
    text = ALL.replace("port: 8001", "port: 8001, vllm_args: {tensor-parallel-size: 2}")
    given = inputs(tmp_path, text, glm=QWEN)
    assert not view(tmp_path, given, text, cards=cards).reasons
    linked = {**state().cards, "topo": matrix(uniform(4, "NV12"))}
    sized = view(tmp_path, inputs(tmp_path, glm=QWEN), cards=linked).sized["glm-a"]
    assert sized.choices is not None
    assert sized.choices["tensor-parallel-size"] == 2


def test_a_config_that_cannot_be_sized_is_said_and_never_a_traceback(tmp_path: Path) -> None:
    for broken in ({}, {"architectures": ["Qwen3ForCausalLM"]}, {**QWEN, "hidden_size": "big"}):
        sized = view(tmp_path, inputs(tmp_path, qwen=broken)).sized["qwen-a"]
        assert sized.sizing is None
        assert sized.why_not
        assert not sized.args


def test_a_bar_holds_its_parts_and_they_never_exceed_the_card(tmp_path: Path) -> None:
    text = ALL.replace("port: 8002", "port: 8002, vllm_args: {gpu-memory-utilization: 0.5}")
    given = inputs(tmp_path, text, qwen=QWEN)
    found = fleet(tmp_path, all=text)
    data = overview(found, states(found), {"gpu-2": "unreachable: no route"}, given)
    (bar,) = data["hosts"][0]["instances"][1]["bars"]
    assert bar["card"] == 2
    parts = ("weights", "activation", "context", "graphs", "kv_cache")
    assert 0 < sum(bar[p] for p in parts) < bar["total_gib"]


def test_the_start_s_own_figures_are_compared_with_the_plan(tmp_path: Path) -> None:
    given = inputs(tmp_path, qwen=QWEN)
    sized = view(tmp_path, given).sized["qwen-a"]
    actual = {**sized.expected, "weights_gib": sized.expected["weights_gib"] * 1.2}
    changes = {
        "units": {"vllm@qwen-a.service": {"ActiveState": "active", "UnitFileState": "enabled"}},
        "instances": {
            "qwen-a": {"running": "", "ready": True, "release": "", "actual": {"actual": actual}}
        },
    }
    found = fleet(tmp_path)
    data = overview(found, states(found, gpu_1=changes), {}, given)
    (warning,) = [w for w in data["warnings"] if "planned" in w]
    assert warning.startswith("gpu-1: instance qwen-a: weights: ")
    assert "(+20.0 %)" in warning


def test_a_host_without_facts_is_shown_with_why(tmp_path: Path) -> None:
    found = fleet(tmp_path)
    some = states(found)
    del some["gpu-2"]
    data = overview(found, some, {"gpu-2": "unreachable: no route"}, Inputs())
    assert [h["name"] for h in data["hosts"]] == ["gpu-1", "gpu-2", "gw-1"]
    assert not data["hosts"][1]["reached"]
    assert "gpu-2: unreachable: no route" in data["warnings"]
    assert data["ok"]


def test_a_host_that_cannot_be_managed_is_told_that_alone(tmp_path: Path) -> None:
    text = ALL.replace("cards: [2]", "cards: 4 x H100")
    found = view(tmp_path, Inputs(), text, systemd=False, init="tini")
    (reason,) = found.reasons
    assert "PID 1 is tini" in reason


def test_given_traffic_decides_the_longest_request(tmp_path: Path) -> None:
    text = ALL.replace("revision: v2}", "revision: v2, traffic: {longest: 20000, concurrent: 4}}")
    sized = view(tmp_path, inputs(tmp_path, text, qwen=QWEN), text).sized["qwen-a"]
    assert sized.args["max-model-len"] == 20480  # rounded up
    assert sized.choices is not None
    (choice,) = [c for c in sized.choices.settings if c.name == "max-model-len"]
    assert "20000 tokens" in choice.reason


def test_memory_of_adapters_is_told_as_left_out(tmp_path: Path) -> None:
    text = ALL.replace("revision: v2}", "revision: v2, adapters: {support: {path: /data/a}}}")
    read = inputs(tmp_path, text, qwen=QWEN)
    found = fleet(tmp_path, all=text)
    views = survey(found, states(found), read)
    notices = [n for n in views["gpu-1"].notices if "LoRA" in n]
    assert notices == [
        "instance qwen-a: memory of its 1 LoRA adapter is not in these figures: leave some of each "
        "card free"
    ]
