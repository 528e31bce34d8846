"""Adapters, sampling and thinking of a model, checked where they are written."""

from __future__ import annotations

import pytest

from tests.unit.spec.conftest import Project


def complaints(project: Project, more: str, version: str = "0.21.0") -> list[str]:
    project.good(("Air\n", f"Air\n{more}"), ('"0.21.0"', f'"{version}"'))
    return project.complaints()


def test_good_settings_pass(project: Project) -> None:
    text = (
        "    adapters: {support: {path: /data/support}}\n"
        "    generation_config: {temperature: 0.7, top_p: 0.8, repetition_penalty: 1.05}\n"
        "    reasoning: {parser: glm45, thinking: false, budget: true}\n"
    )
    assert complaints(project, text) == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("    adapters: {support: {path: data}}\n", "adapters.support.path: must be an absolute"),
        ("    adapters: {support: {path: /a, rank: 24}}\n", "adapters.support.rank: "),
        ("    adapters: {glm: {path: /a}}\n", '"glm" is a model already'),
        (
            "    generation_config: {length_penalty: 1}\n",
            "generation_config.length_penalty: no such setting",
        ),
        (
            "    generation_config: {presence_penalty: 1}\n",
            "generation_config.presence_penalty: vLLM 0.21.0 leaves it out without a word",
        ),
        ("    generation_config: {temperature: 3}\n", "generation_config.temperature: "),
        ("    reasoning: {parser: glm99}\n", "glm99"),
        ("    reasoning: {thinking: true}\n", "reasoning.parser"),
        (
            "    adapters: {support: {path: /a}}\n    vllm_args: {max_loras: 4}\n",
            "vllm_args.max_loras: is set by `adapters` of model glm: write it there",
        ),
        (
            "    generation_config: {top_p: 0.5}\n"
            "    vllm_args: {override-generation-config: {top_p: 0.9}}\n",
            "is set by `generation_config` of model glm",
        ),
    ],
)
def test_what_cannot_be_is_told_at_its_key(project: Project, text: str, wanted: str) -> None:
    found = complaints(project, text)
    assert any(wanted in one for one in found), found


def test_a_version_that_cannot_bound_thinking_is_told_at_the_setting(project: Project) -> None:
    text = "    reasoning: {parser: glm45, budget: true}\n"
    (complaint,) = complaints(project, text, "0.18.0")
    assert "models.glm.reasoning: " in complaint
    assert "option `reasoning-config` of it: is not in vLLM 0.18.0" in complaint


def test_a_version_that_takes_the_penalties_may_have_them(project: Project) -> None:
    text = "    generation_config: {presence_penalty: 1, frequency_penalty: 0.2}\n"
    assert complaints(project, text, "0.31.0") == []
