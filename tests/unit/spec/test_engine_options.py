"""Options of vLLM and architectures, checked for the version that an instance gets."""

from __future__ import annotations

import json

import pytest

from tests.unit.spec.conftest import Project
from vllm_fleet import engine_data


def with_args(project: Project, args: str, version: str = "0.21.0") -> None:
    project.good(("Air\n", f"Air\n    vllm_args: {args}\n"), ('"0.21.0"', f'"{version}"'))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            "{disable-log-requests: true}",
            ("prod.yml:5:17: models.glm.vllm_args.disable-log-requests: ", "`enable-log-requests`"),
        ),
        ("{worker-cluster-size: 2}", ("vllm_args.worker-cluster-size: ", "option")),
        ("{limit-mm-per-prompt: none}", ("vllm_args.limit-mm-per-prompt: ", "{")),
        ("{use-v2-block-manager: true}", ("vllm_args.use-v2-block-manager: ",)),
        ("{max-num-seqs: 0}", ("vllm_args.max-num-seqs: ",)),
        ("{tool-call-parser: glm99, enable-auto-tool-choice: true}", ("glm99", "glm45")),
        ("{max_num_sequences: 4}", ("max_num_sequences: ", "write `max-num-seqs`")),
        ("{max-num-seq: 4}", ("max-num-seq: ", "write `max-num-seqs`")),
        ("{enable-prefix-cachin: true}", ("short for", "write `enable-prefix-caching: true`")),
    ],
)
def test_wrong_options_are_told_at_their_key_with_what_to_write(
    project: Project, args: str, words: tuple[str, ...]
) -> None:
    with_args(project, args)
    (complaint,) = project.complaints()
    assert complaint.startswith("group_vars/prod.yml:5:")
    for word in words:
        assert word in complaint, complaint


def test_good_options_and_those_of_a_later_version_pass(project: Project) -> None:
    args = "{gpu-memory-utilization: 0.9, max-num-seqs: 64, tool-call-parser: glm45}"
    with_args(project, args.replace("}", ", enable-auto-tool-choice: true}"))
    assert project.complaints() == []
    with_args(project, "{speculative-config.method: mtp, no-enable-log-requests: true}")
    assert not [c for c in project.complaints() if "enable-log-requests" in c]


@pytest.mark.parametrize("cards", ["[0, 1]", "2 x A100", "2x A100"])
@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ("{tensor-parallel-size: 4}", "tensor-parallel-size = 4"),
        ("{pipeline_parallel_size: 4}", "pipeline-parallel-size = 4"),
        (
            "{tensor-parallel-size: 2, data-parallel-size: 2}",
            "tensor-parallel-size x data-parallel-size = 4",
        ),
    ],
)
def test_more_ranks_than_cards_are_told_at_the_cards(
    project: Project, cards: str, args: str, shown: str
) -> None:
    project.good(("Air\n", f"Air\n    vllm_args: {args}\n"), ("[0, 1]", cards))
    (complaint,) = project.complaints()
    assert f"instances[0].cards: {shown} is more than its 2 cards" in complaint
    project.good(("Air\n", f"Air\n    vllm_args: {args[:-1]}, nnodes: 2}}\n"), ("[0, 1]", cards))
    assert project.complaints() == []


def test_a_wrong_option_of_an_instance_is_told_there_and_wins_over_the_model(
    project: Project,
) -> None:
    project.good(
        ("Air\n", "Air\n    vllm_args: {max-num-seqs: 0}\n"),
        ("port: 8001\n", "port: 8001\n    vllm_args: {max_num_seqs: many}\n"),
    )
    (complaint,) = project.complaints()
    assert "instances[0].vllm_args.max_num_seqs: " in complaint
    project.good(
        ("Air\n", "Air\n    vllm_args: {max-num-seqs: 0}\n"),
        ("port: 8001\n", "port: 8001\n    vllm_args: {max_num_seqs: 8}\n"),
    )
    assert project.complaints() == []


def test_each_instance_is_checked_for_its_own_version(project: Project) -> None:
    newer = engine_data.load("0.33.0").options.keys() - engine_data.load("0.21.0").options.keys()
    name = next(n for n in sorted(newer) if engine_data.load("0.33.0").options[n].is_flag)
    name = name.removeprefix("--").removeprefix("no-")
    with_args(project, f"{{{name}: true}}")
    (complaint,) = project.complaints()
    assert f"vllm_args.{name}: " in complaint
    with_args(project, f"{{{name}: true}}\n    vllm_version: 0.33.0")
    assert project.complaints() == []


def test_options_that_are_refused_already_are_told_once(project: Project) -> None:
    with_args(project, '{port: 9000, chat-template: "a\\0b"}')
    assert len(project.complaints()) == 2


def test_a_version_without_data_is_checked_against_the_nearest_and_said(
    project: Project,
) -> None:
    with_args(project, "{worker-cluster-size: 2}", "0.99.0")
    result = project.check()
    assert "worker-cluster-size" in str(result.complaints[0])
    (warning,) = [w for w in result.warnings if "0.99.0" in str(w)]
    assert str(warning).startswith("group_vars/prod.yml:1:")
    assert "no data here" in str(warning)
    assert "0.33.0" in str(warning)


CONFIG = "configs/glm@master.json"


def test_an_architecture_no_version_knows_is_refused_before_any_download(
    project: Project,
) -> None:
    project.write(CONFIG, json.dumps({"architectures": ["Glm5NextForConditionalGeneration"]}))
    (complaint,) = project.complaints()
    assert complaint.startswith("group_vars/prod.yml:4:11: models.glm.repo: vLLM 0.21.0")
    assert "Glm5NextForConditionalGeneration" in complaint
    project.good(("Air\n", "Air\n    vllm_args: {model-impl: transformers}\n"))
    assert project.complaints() == []


def test_an_architecture_that_a_later_version_knows_names_that_version(
    project: Project,
) -> None:
    project.write(CONFIG, json.dumps({"architectures": ["Glm4MoeForCausalLM"]}))
    assert project.complaints() == []
    newer = sorted(
        engine_data.load("0.33.0").architectures - engine_data.load("0.18.0").architectures
    )[0]
    first = engine_data.first_version_with(newer)
    project.write(CONFIG, json.dumps({"architectures": [newer]}))
    project.good(('"0.21.0"', '"0.18.0"'))
    (complaint,) = project.complaints()
    assert f"the first version with it is {first}" in complaint


@pytest.mark.parametrize("text", ["{", "[]", "<html>"])
def test_a_config_that_is_none_is_told_and_never_a_traceback(project: Project, text: str) -> None:
    project.write(CONFIG, text)
    (complaint,) = project.complaints()
    assert complaint.startswith(f"{CONFIG}: ")
    assert "fetch it again, or delete it" in complaint
