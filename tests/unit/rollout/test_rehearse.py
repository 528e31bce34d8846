"""The command line of a version, tried on its own release: a stand-in of vLLM's parser.

The real one is asked on real hosts, with every upgrade there.
"""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.planned import planned
from vllm_fleet import instance, paths
from vllm_fleet.onhost import rehearse
from vllm_fleet.rollout.rehearsal import as_rehearsed

PARSER = "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser):\n    pass\n"
SERVE = """\
class ServeSubcommand:
    def subparser_init(self, subparsers):
        parser = subparsers.add_parser("serve")
        parser.add_argument("model_tag", nargs="?")
        for name in ("host", "port", "served-model-name", "middleware", "tensor-parallel-size",
                     "max-model-len", "chat-template"):
            parser.add_argument("--" + name)
        parser.add_argument("--disable-uvicorn-access-log", action="store_true")
        return parser

    def validate(self, args):
        if args.chat_template == "none":
            raise TypeError("no template")
"""
ARGS = """\
import os
class AsyncEngineArgs:
    @classmethod
    def from_cli_args(cls, args):
        self = cls()
        self.args = args
        return self

    def create_engine_config(self):
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert os.environ["VLLM_CACHE_ROOT"] == os.environ["HOME"] == os.getcwd()
        assert os.environ["QUOTED"] == 'a "b" $c'
        if int(self.args.max_model_len or 0) > 4096:
            raise ValueError("User-specified max_model_len is greater than the derived one")
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release whose vLLM is a few lines."""
    monkeypatch.setattr(rehearse, "USER", getpass.getuser())
    monkeypatch.setattr(paths, "RELEASES", str(tmp_path))
    folder = tmp_path / "0.32.0-abc"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    modules = folder / "modules/vllm"
    for name, text in (
        ("utils/argparse_utils", PARSER),
        ("entrypoints/cli/serve", SERVE),
        ("engine/arg_utils", ARGS),
    ):
        path = modules / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return folder


def tried(release: Path, **changes: Any) -> str:
    """Rehearse the files of a planned instance, as deploy.py renders them."""
    one = planned(
        release=release.name,
        env={"QUOTED": 'a "b" $c', "PYTHONPATH": str(release / "modules")},
        **changes,
    )
    files = [{"path": f.path, "content": f.content} for f in instance.files(one)]
    return rehearse.rehearse(files)


def test_a_command_line_that_the_release_takes(release: Path) -> None:
    assert tried(release) == ""


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"calculate-kv-scales": True}, "unrecognized arguments: --calculate-kv-scales"),
        (
            {"max-model-len": 9000},
            "ValueError: User-specified max_model_len is greater than the derived one",
        ),
        ({"chat-template": "none"}, "TypeError: no template"),
    ],
)
def test_what_the_release_refuses_is_said_in_its_own_words(
    release: Path, args: dict[str, Any], why: str
) -> None:
    assert tried(release, args=args) == why


def test_a_release_that_cannot_be_asked_is_left_to_its_start(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (release / "modules/vllm/entrypoints/cli/serve.py").unlink()
    assert tried(release) == ""
    monkeypatch.setattr(rehearse, "SECONDS", 0.01)
    assert tried(release, args={"nonsense": True}) == ""


def test_an_exception_is_told_with_what_stands_below_it() -> None:
    text = (
        'Traceback (most recent call last):\n  File "x.py", line 1\n'
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (9) is too large [type=value_error]\n"
        "    For further information visit\n"
    )
    assert "ModelConfig Value error, User-specified max_model_len (9)" in rehearse.cause(text)
    assert rehearse.cause("Killed\n") == "Killed"
    assert rehearse.cause("") == "it ended without a word"


def test_what_is_not_installed_is_said(release: Path) -> None:
    (release / "modules/vllm/engine/arg_utils.py").write_text("import torch_of_nobody\n")
    assert "ModuleNotFoundError: No module named 'torch_of_nobody'" in tried(release)
    (release / "bin/python").unlink()
    assert tried(release) == f"{release}/bin/python is missing"
    assert rehearse.rehearse([]) == "no command line in its start script"


def files_of(**changes: Any) -> list[dict[str, str]]:
    return [{"path": f.path, "content": f.content} for f in instance.files(planned(**changes))]


def test_replicas_of_a_host_are_rehearsed_as_one() -> None:
    of_a = as_rehearsed("a", files_of(name="a", port=8001))
    assert as_rehearsed("bb", files_of(name="bb", port=8002, cards=(6, 7))) == of_a


@pytest.mark.parametrize(
    "changes",
    [
        {"args": {"max-model-len": 9000}},
        {"env": {"VLLM_USE_V2_MODEL_RUNNER": "1"}},
        {"release": "0.22.0-abc"},
    ],
)
def test_whatever_else_differs_is_rehearsed_on_its_own(changes: dict[str, Any]) -> None:
    assert as_rehearsed("a", files_of(**changes)) != as_rehearsed("a", files_of())


def test_a_rank_of_a_span_is_tried_by_vllms_own_words() -> None:
    script = "exec /usr/bin/python3 -s -E /lib/span.py \\\n  /r/bin/vllm serve w \\\n  --nnodes 2\n"
    assert rehearse.command(script) == ["/r/bin/vllm", "serve", "w", "--nnodes", "2"]
