"""Adapters, sampling and thinking of a model, as settings, in the real vLLM on CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.one_engine import ARGS, Server, started
from tests.testbed import tiny_models
from vllm_fleet.model_options import given_options
from vllm_fleet.spec.model import Adapter, GenerationConfig, Instance, Model, Reasoning

pytestmark = [pytest.mark.long, pytest.mark.vllm]

# Qwen3's own switch: a template that is told not to think begins with an empty thought.
SWITCH = (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One instance with all of it, as settings of its model."""
    folder = tmp_path_factory.mktemp("settings")
    weights = tiny_models.make(folder / "model", "qwen3")
    config = json.loads((weights / "tokenizer_config.json").read_text())
    config["chat_template"] += SWITCH
    (weights / "tokenizer_config.json").write_text(json.dumps(config))
    adapter = tiny_models.make_adapter(folder / "adapters" / "of = support", "qwen3")
    model = Model(
        source="path",
        repo=str(weights),
        max_model_len=tiny_models.CONTEXT,
        vllm_args=ARGS,
        adapters={"support": Adapter(path=str(adapter), rank=8)},
        generation_config=GenerationConfig(temperature=0, max_new_tokens=12),
        reasoning=Reasoning(parser="qwen3", thinking=False, budget=True),
    )
    instance = Instance(name="tiny", hosts=("here",), model="tiny", port=8001)
    with (
        pytest.MonkeyPatch.context() as patch,
        started(
            engine.resolve(), folder, patch, model, given_options("tiny", model, instance)
        ) as s,
    ):
        s.wait_for_http()
        (s.run / "ready").touch()
        yield s


def chat(server: Server, model: str = "tiny", **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}
    status, _, text = server.ask("POST", "/v1/chat/completions", body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def said(answer: dict[str, Any]) -> str:
    message = answer["choices"][0]["message"]
    return str(message.get("content") or "") + str(message.get("reasoning") or "")


def test_an_adapter_is_listed_under_its_name_and_answers_otherwise(server: Server) -> None:
    _, _, text = server.ask("GET", "/v1/models")
    listed = {one["id"]: one for one in json.loads(text)["data"]}
    assert set(listed) == {"tiny", "support"}
    assert listed["support"]["parent"] == "tiny"
    assert said(chat(server)) != said(chat(server, "support"))


def test_sampling_holds_where_a_request_says_nothing(server: Server) -> None:
    answers = {said(chat(server, ignore_eos=True)) for _ in range(3)}
    assert len(answers) == 1  # temperature 0
    assert chat(server, ignore_eos=True)["usage"]["completion_tokens"] == 12
    assert chat(server, ignore_eos=True, max_tokens=5)["usage"]["completion_tokens"] == 5
    warm = {said(chat(server, ignore_eos=True, temperature=1.5, seed=n)) for n in range(5)}
    assert len(warm) > 1


def test_thinking_is_off_until_a_request_asks_for_it(server: Server) -> None:
    off = chat(server)["usage"]["prompt_tokens"]
    on = chat(server, chat_template_kwargs={"enable_thinking": True})["usage"]["prompt_tokens"]
    assert off > on  # the empty thought stands in the prompt


def test_a_request_may_bound_its_thinking(server: Server) -> None:
    asked = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 4}
    assert chat(server, **asked)["usage"]["completion_tokens"] <= 12
