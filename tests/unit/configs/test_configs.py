"""config.json of models: from a host's weights, else from the hub, written beside group_vars."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.fleets import ALL, fleet, states
from tests.unit.survey.test_survey import ON_HOST, QWEN
from vllm_fleet.configs import complete
from vllm_fleet.spec.inputs import read_inputs


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has files by (repository, revision, name)."""

    files: dict[tuple[str, str, str], str] = {}  # noqa: RUF012  set by each test
    cookies: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        repo = url.path.removeprefix("/api/v1/models/").removesuffix("/repo")
        self.cookies.append(self.headers.get("Cookie"))
        text = self.files.get((repo, query["Revision"], query["FilePath"]))
        self.send_response(404 if text is None else 500 if text == "down" else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.files, Hub.cookies = {}, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def with_hub(root: Path, hub: str, more: str = "") -> str:
    (root / "token").write_text("secret-token\n")
    return ALL + f"hub: {{endpoint: '{hub}', token_file: token}}\n{more}"


def test_what_is_missing_is_fetched_once_with_its_quantisation(tmp_path: Path, hub: str) -> None:
    Hub.files = {
        ("ZhipuAI/GLM-4-9B-0414", "v1", "config.json"): json.dumps(QWEN),
        ("ZhipuAI/GLM-4-9B-0414", "v1", "hf_quant_config.json"): json.dumps(
            {"quantization": {"quant_algo": "NVFP4"}}
        ),
        ("Qwen/Qwen3-8B", "v2", "config.json"): json.dumps({**QWEN, "quantization_config": {}}),
    }
    found = fleet(tmp_path, all=with_hub(tmp_path, hub))
    given = read_inputs(found)
    written, failed = complete(found, {}, given)
    assert failed == []
    assert sorted(written) == ["configs/glm@v1.json", "configs/qwen@v2.json"]
    glm = json.loads((tmp_path / "configs/glm@v1.json").read_text())
    assert glm["quantization_config"] == {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert read_inputs(found).configs == given.configs
    assert Hub.cookies == ["m_session_id=secret-token"] * 3
    assert complete(found, {}, read_inputs(found)) == ([], [])
    assert len(Hub.cookies) == 3


def test_weights_on_a_host_are_asked_before_the_hub(tmp_path: Path, hub: str) -> None:
    found = fleet(tmp_path, all=with_hub(tmp_path, hub))
    written, failed = complete(found, states(found, gpu_2=ON_HOST), read_inputs(found))
    assert written == ["configs/qwen@v2.json"]
    assert json.loads((tmp_path / "configs/qwen@v2.json").read_text()) == QWEN
    (problem,) = failed  # once, though two hosts want it
    assert "ZhipuAI/GLM-4-9B-0414 has no config.json at v1: check `repo` and `revision`" in problem


def test_a_hub_that_fails_or_answers_nonsense_is_said(tmp_path: Path, hub: str) -> None:
    Hub.files = {
        ("ZhipuAI/GLM-4-9B-0414", "v1", "config.json"): "down",
        ("Qwen/Qwen3-8B", "v2", "config.json"): "<html>",
    }
    found = fleet(tmp_path, all=with_hub(tmp_path, hub))
    written, failed = complete(found, {}, read_inputs(found))
    assert written == []
    assert f"{hub} answers 500 for config.json" in failed[0]
    assert "configs/glm@v1.json" in failed[0]
    assert "not readable as JSON" in failed[1]
    assert not any("secret-token" in text for text in failed)
    assert not list(tmp_path.glob("configs/*"))


def test_no_hub_at_all(tmp_path: Path) -> None:
    found = fleet(tmp_path, all=with_hub(tmp_path, "http://127.0.0.1:9"))
    _, failed = complete(found, {}, read_inputs(found))
    assert "cannot be reached from here" in failed[0]
    text = ALL.replace("{repo: ZhipuAI/GLM-4-9B-0414, revision: v1", "{source: path, repo: /m")
    found = fleet(tmp_path, all=text)
    _, failed = complete(found, states(found, gpu_1=ON_HOST), read_inputs(found))
    assert failed == [
        "model glm: source path has no hub to ask; put its config.json at configs/glm.json"
    ]
