"""Command lines checked against versions."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from vllm_fleet.cli.args import args as command
from vllm_fleet.engine_args import ArgError, check_args, check_request, examine
from vllm_fleet.engine_data import versions

GOOD = [
    "/opt/vllm/models/glm-4.5-air/v1.0",
    *("--served-model-name", "glm-4.5-air", "glm"),
    *("--tensor-parallel-size", "4"),
    *("--max-model-len", "32768"),
    *("--gpu-memory-utilization", "0.9"),
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "glm45"),
    *("--reasoning-parser", "glm45"),
    *("--middleware", "gate.Gate"),
    *("--host", "127.0.0.1", "--port", "8001"),
    "--no-enable-log-requests",
]


def errors(version: str, *words: str) -> list[ArgError]:
    return list(check_args(version, words))


def only(version: str, *words: str) -> ArgError:
    found = errors(version, *words)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("version", versions())
def test_a_good_line_is_good_everywhere(version: str) -> None:
    assert errors(version, *GOOD) == []
    assert errors(version, "vllm", "serve", *GOOD) == []


# -- rows 5, 15 and 16 of what articles tell operators to write


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize(
    ("words", "problem", "instead"),
    [
        (["--chat-template", "llama_3"], "no chat template is called 'llama_3'", "model's own"),
        (["--disable-log-requests"], "removed", "--enable-log-requests"),
        (["--worker-cluster-size", "4"], "never was an option", "--tensor-parallel-size N"),
        (["--limit-mm-per-prompt", "none"], "is not JSON", """'{"image": 0, "video": 0}'"""),
        (["--limit-mm-per-prompt=none"], "is not JSON", """'{"image": 0, "video": 0}'"""),
        (["--use-v2-block-manager"], "removed", "leave it out"),
        (["--thinking-budget", "512"], "no option of vLLM", "thinking_token_budget"),
        (
            ["--override-generation-config", '{"thinking_budget": 512}'],
            "ignored by vLLM",
            "thinking_token_budget",
        ),
    ],
)
def test_wrong_options_of_articles(
    version: str, words: list[str], problem: str, instead: str
) -> None:
    found = only(version, *GOOD, *words)
    assert problem in found.problem
    assert instead in found.instead
    assert words[0].split("=")[0] in found.arg


def test_thinking_budget_of_a_request() -> None:
    (found,) = check_request("0.21.0", ["temperature", "thinking_budget"])
    assert found.problem == "is ignored by vLLM"
    assert found.instead.startswith("thinking_token_budget")
    assert check_request("0.21.0", ["thinking_token_budget", "top_p"]) == ()
    (early,) = check_request("0.18.0", ["thinking_token_budget"])
    assert early.instead == "vLLM 0.19.0 or later"


# -- what argparse lets through


@pytest.mark.parametrize(
    ("words", "problem", "instead"),
    [
        (["--gpu-memory-utilization", "1.5"], "at most 1", "--gpu-memory-utilization 0.90"),
        (["--gpu-memory-utilization", "0"], "more than 0", "up to 1"),
        (["--gpu-memory-utilization", "90%"], "no number", "NUMBER"),
        (["--quantization", "fp9"], "knows no 'fp9'", "--quantization fp8"),
        (["-q", "fp9"], "knows no 'fp9'", "-q fp8"),
        (["-qfp9"], "knows no 'fp9'", "fp8"),
        (["--quantization", "petit_nvfp4"], "no method", "modelopt_fp4"),
        (["--quantization", "fbgemm_fp8"], "deprecated", "--allow-deprecated-quantization"),
        (["--reasoning-parser", "glm47"], "it came with 0.24.0", "--reasoning-parser glm45"),
        (["--reasoning-parser", "nothing-like-it"], "knows no", "one of"),
        (["--distributed-executor-backend", "rai"], "knows no 'rai'", "ray"),
        (["--attention-backend", "FLASH_ATN"], "knows no", "FLASH_ATTN"),
        (["--load-format", "saftensors"], "knows no", "safetensors"),
        (["--tensor-parallel-size", "0"], "at least 1", "at least 1"),
        (["-tp", "two"], "no whole number", "-tp NUMBER"),
        (["--port", "70000"], "is no port", "1 to 65535"),
        (["--kv-cache-dtype", "fp16"], "knows no 'fp16'", "--kv-cache-dtype float16"),
        (["--dtype", "bf16"], "knows no 'bf16'", "bfloat16"),
        (["--max-model-len", "32kk"], "no number such as", "32k"),
        (["--max-num-batched-tokens", "8.5K"], "take no decimals", "8.5k"),
        (["-O9"], "knows no '9'", "one of 0, 1, 2, 3"),
        (["--enable-prefix-caching", "true"], "takes no value", "--enable-prefix-caching"),
        (["--enable-prefix-caching=false"], "takes no value", "--no-enable-prefix-caching"),
        (["--kv-transfer-config", "{kv_role: x}"], "is not JSON", "single quotes"),
        (["--kv-transfer-config", '{"kv_rol": "x"}'], "'kv_rol' is no setting", "kv_role"),
        (["--compilation-config.mod", "3"], "'mod' is no setting", "mode"),
        (["--speculative-config", '{"methd": "mtp"}'], "'methd' is no setting", "method"),
        (["--max-num-seqs"], "has no value", "--max-num-seqs NUMBER"),
        (["--max-num-queued-reqs", "5"], "it came with 0.29.0", "vLLM 0.29.0"),
        (["--max-num-sequences", "5"], "no option of vLLM 0.21.0", "--max-num-seqs"),
        (["--enable-log-outputs"], "outputs logged and requests not", "--enable-log-requests"),
        (["stray"], "belongs to no option", "the option before it"),
    ],
)
def test_values_and_names(words: list[str], problem: str, instead: str) -> None:
    model = GOOD[:1]
    found = only("0.21.0", *model, *words)
    assert problem in found.problem
    assert instead in found.instead


@pytest.mark.parametrize(
    "words",
    [
        ["--compilation-config.mode", "3", "--compilation-config.mode.x", "1"],
        ["--compilation-config", "[" * 5000],
        ["--hf-overrides", '{"a": ' + "1" * 5000 + "}"],
        ["--port", "\u00b2"],
        ["--port", "1" * 5000],
        ["--max-lora-rank", "1" * 5000],
        ["--limit-mm-per-prompt", "1" * 5000],
    ],
)
def test_words_that_python_chokes_on_are_findings(words: list[str]) -> None:
    assert errors("0.21.0", "m", *words)


def test_no_far_name_is_proposed() -> None:
    assert only("0.21.0", "m", "--tool-call-parser", "baz").instead.startswith("one of")


def test_a_parser_for_tools_must_be_named_and_known() -> None:
    missing = only("0.21.0", "m", "--enable-auto-tool-choice")
    assert "--tool-call-parser NAME" in missing.instead
    wrong = only("0.21.0", "m", "--enable-auto-tool-choice", "--tool-call-parser", "glm-45")
    assert wrong.instead == "--tool-call-parser glm45"
    plugin = ["--tool-parser-plugin", "/opt/p.py", "--tool-call-parser", "mine"]
    assert errors("0.21.0", "m", "--enable-auto-tool-choice", *plugin) == []


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--tensor-par", "--tensor-parallel-size"),
        ("-as", "-asc"),
    ],
)
def test_abbreviations_are_told_and_their_values_checked(short: str, full: str) -> None:
    found = only("0.21.0", "m", short, "4")
    assert (found.arg, found.instead) == (short, full)
    assert f"short for {full}" in found.problem
    assert len(errors("0.21.0", "m", short, "none")) == 2


def test_an_ambiguous_abbreviation_is_refused() -> None:
    found = only("0.21.0", "m", "--max-num", "4")
    assert "could be --max-num-batched-tokens" in found.problem


def test_removed_options_name_the_version_that_dropped_them() -> None:
    assert errors("0.21.0", "m", "--calculate-kv-scales") == []
    found = only("0.28.0", "m", "--calculate-kv-scales")
    assert "gone since 0.28.0" in found.problem
    gone = only("0.30.0", "m", "--no-enable-bf16x3-router-gemm")
    assert "removed" in gone.problem
    assert errors("0.29.0", "m", "--no-enable-bf16x3-router-gemm") == []


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor_parallel_size", "2"],
        ["--tensor-parallel-size=2"],
        ["-tp", "2"],
        ["-O3"],
        ["-O", "3"],
        ["--compilation-config.mode", "3"],
        ["--compilation-config", '{"mode": 3}'],
        ["--kv-transfer-config", '{"kv_buffer_size": 1k}'],
        ["--max-model-len", "-1"],
        ["--max-model-len", "auto"],
        ["--max-num-batched-tokens", "8k"],
        ["--hf-overrides", '{"architectures": ["X"]}'],
        ["--lora-modules", "a=/x", "b=/y"],
        ["--chat-template", "/opt/t.jinja"],
        ["--chat-template", "{{ messages }}"],
        ["--chat-template", "template_chatml.jinja"],
        ["--limit-mm-per-prompt", '{"image": 0}'],
        ["--limit-mm-per-prompt.image", "0"],
        ["--distributed-executor-backend", "my.module.Executor"],
        ["--attention-backend", "flash_attn"],
        ["--max-lora-rank", "64"],
        ["--moe-backend", "Flashinfer-Cutlass"],
    ],
)
def test_what_vllm_takes_is_taken(words: list[str]) -> None:
    assert errors("0.21.0", "m", *words) == []


def test_each_mistake_is_told_once() -> None:
    found = errors("0.21.0", "m", "--no-such-option", "1", "2", "--worker-cluster-size", "8")
    assert [e.arg for e in found] == ["--no-such-option", "--worker-cluster-size"]


def test_hints_do_not_refuse() -> None:
    old = examine("0.21.0", ["m", "--quantization", "awq", "--api-key", "k"])
    assert old.errors == ()
    assert ["slow AWQ kernel" in h.problem or "list of processes" in h.problem for h in old.hints]
    assert len(old.hints) == 2
    assert "k" not in [h.arg for h in old.hints]  # the key itself is never repeated
    assert examine("0.24.0", ["m", "--quantization", "awq"]).hints == ()
    assert "has no data here" in examine("0.33.9", ["m"]).hints[0].problem


# -- the command


def test_command_prints_json_and_exits_by_findings() -> None:
    run = CliRunner().invoke(command, ["0.21.0", "--json", "--", "m", "--use-v2-block-manager"])
    assert run.exit_code == 1
    assert json.loads(run.output)["errors"] == [
        {
            "arg": "--use-v2-block-manager",
            "problem": "removed: it belonged to the V0 engine, which is gone",
            "instead": "nothing: leave it out",
        }
    ]
    good = CliRunner().invoke(command, ["0.21.0", "--json", "--", *GOOD])
    assert (good.exit_code, json.loads(good.output)) == (0, {"errors": [], "hints": []})
    assert CliRunner().invoke(command, ["newest", "--", "m"]).exit_code == 2
    assert CliRunner().invoke(command, []).exit_code == 2


def test_command_loads_nothing_that_is_slow() -> None:
    """It is to answer in under 0.3 s: what costs that is what it imports."""
    code = (
        "import sys; from vllm_fleet.cli.args import args\n"
        "try: args()\n"
        "finally: print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    words = ["0.21.0", "--", "m", "--no-such-option", "--reasoning-parser", "glm47"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    loaded = set(re.findall(r"'(\w+)'", done.stdout.splitlines()[-1]))
    assert "vllm_fleet" in loaded
    assert not loaded & {"pyinfra", "gevent", "pydantic", "torch", "vllm", "modelscope", "rich"}
