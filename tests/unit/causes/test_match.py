"""Every known failure is found in a report of its shape, and sound logs are not accused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from vllm_fleet.causes import Rank, last_error, load, match
from vllm_fleet.causes.table import TableError, parse

HERE = Path(__file__).parent
REPORTS: dict[str, str] = yaml.safe_load((HERE / "reports.yml").read_text())
EXCERPTS: list[dict[str, str]] = yaml.safe_load((HERE / "excerpts.yml").read_text())
HARMLESS: list[str] = yaml.safe_load((HERE / "harmless.yml").read_text())

BOOT = """\
(APIServer pid=4301) INFO 11-02 09:13:05 [api_server.py:1839] vLLM API server version 0.20.0
(EngineCore pid=4411) INFO 11-02 09:13:20 [core.py:93] Initializing a V1 LLM engine
"""
LAST_LINES = """\
(APIServer pid=4301) RuntimeError: Engine core initialization failed. See root cause above. \
Failed core proc(s): {}
systemd[1]: vllm@air-a.service: Main process exited, code=exited, status=1/FAILURE
systemd[1]: vllm@air-a.service: Failed with result 'exit-code'.
"""


def test_every_cause_has_a_report() -> None:
    assert set(REPORTS) == {c.id for c in load()}


@pytest.mark.parametrize("name", REPORTS)
def test_report_is_explained(name: str) -> None:
    found = match(REPORTS[name])
    assert found
    assert found[0].id == name
    assert found[0].line in REPORTS[name]


@pytest.mark.parametrize("number", range(len(EXCERPTS)))
def test_excerpt_of_another_report_is_explained(number: int) -> None:
    found = match(EXCERPTS[number]["text"])
    assert found
    assert found[0].id in EXCERPTS[number]["id"].split("|")


@pytest.mark.parametrize("name", [c.id for c in load() if c.rank < Rank.GENERIC])
def test_root_is_named_before_the_generic_last_lines(name: str) -> None:
    found = match(BOOT + REPORTS[name] + LAST_LINES)
    assert found[0].id == name
    assert {"engine-init-failed", "unit-exited"} <= {m.id for m in found[1:]}


@pytest.mark.parametrize("number", range(len(HARMLESS)))
def test_sound_log_is_not_accused(number: int) -> None:
    assert match(HARMLESS[number]) == []


def test_a_whole_log_of_the_engine_from_start_to_stop_is_not_accused() -> None:
    """As vLLM 0.32.0 printed it on a processor; its stop ends with a traceback, and is sound."""
    log = (HERE / "start_and_stop_0.32.0.log").read_text()
    assert match(log) == []
    died = log + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    assert match(died)[0].id == "illegal-access"


def test_what_must_not_occur_rules_out() -> None:
    line = "ERROR [async_llm.py:906] AsyncLLM output_handler failed.\n"
    assert [m.id for m in match(line)] == ["engine-dead"]
    assert match("INFO [core_client.py:777] [shutdown] MPClient: complete\n" + line) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("container exited (137)", "killed-9"),
        ("vllm@a.service: Failed at step EXEC spawning /etc/vllm/a.sh: Permission denied",
         "unit-exec"),
        ("KeyError: 'model.layers.0.mlp.experts.w2_weight'", "weights-of-another-model"),
        ("huggingface_hub.errors.RevisionNotFoundError: 404 Client Error", "hub-no-such-model"),
        ("nginx: [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)", "port-in-use"),
        ("torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB", "cuda-oom"),
        ("ncclRemoteError: A call failed possibly due to a network error", "nccl-error"),
        ("RuntimeError: CUDA driver error: invalid device ordinal", "device-ordinal"),
        ('{"status": 499, "request": "POST /v1/completions HTTP/1.1"}', "nginx-client-gone"),
        ("Using /bin/sh: 1: :/usr/local/cuda-12.8/bin/nvcc: not found", "nvcc-missing"),
        ("ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU "
         "memory utilization (0.95, 45.01 GiB).", "card-memory-taken"),
    ],
)  # fmt: skip
def test_other_words_for_the_same(line: str, name: str) -> None:
    assert match(line)[0].id == name


def test_unknown_text_is_unknown() -> None:
    assert match("") == []
    assert match("the cat sat on the mat\n") == []


def test_colours_and_progress_bars_hide_nothing() -> None:
    text = "\x1b[31mERROR\x1b[0m shards:  50%|##\rshards: 100%|####\rheader too \x1b[1msmall\x1b[0m"
    (found,) = match(text)
    assert (found.id, found.line) == ("shard-empty", "header too small")


def test_version_rules_out_what_cannot_happen() -> None:
    text = "Sequence group 3 is preempted by PreemptionMode.RECOMPUTE mode"
    assert [m.id for m in match(text)] == ["preempted"]
    assert [m.id for m in match(text, "0.20.1")] == ["preempted"]
    assert match(text, "0.21.0") == []
    with pytest.raises(ValueError, match="not a version"):
        match(text, "new")


def test_a_large_log_takes_seconds() -> None:
    lines = 'INFO:     10.0.0.3:41022 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 30_000
    began = time.monotonic()
    assert match(lines) == []
    assert time.monotonic() - began < 10
    # Lines that tell of more are kept, wherever they stand.
    last = "ValueError: No available memory for the cache blocks.\n"
    (found,) = match(lines + last)
    assert found.id == "no-kv-memory"


ENTRY = "- {id: a, pattern: 'x', where: engine, cause: c, remedy: r, source: s}\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: 1", "not a list"),
        (ENTRY * 2, "a: id: used twice"),
        (ENTRY.replace("remedy: r, ", ""), "a: remedy: missing"),
        (ENTRY.replace("where: engine", "where: moon"), "a: where: one of"),
        (ENTRY.replace("'x'", "'('"), "a: pattern: "),
        (ENTRY.replace("'x'", "'x*'"), "a: pattern: matches everything"),
        (ENTRY.replace("pattern: 'x'", "frame: '('"), "a: frame: "),
        (ENTRY.replace("pattern: 'x'", "pattern: 'x', frame: 'y'"), "a: pattern: unknown key"),
        (ENTRY.replace("source: s", "source: s, rank: top"), "a: rank: root, symptom, trace or"),
        (ENTRY.replace("source: s", "source: s, since: 'v1'"), "a: since: not a version"),
        (ENTRY.replace("source: s", "source: s, over: '('"), "a: over: "),
        (ENTRY.replace("source: s", "source: s, status: '200'"), "a: status: an HTTP status of"),
        (ENTRY.replace("pattern: 'x'", "frame: 'y', status: '404'"), "a: status: unknown key"),
        (ENTRY.replace("source: s", "source: s, sorce: t"), "a: sorce: unknown key"),
        (ENTRY.replace("id: a", "id: A b"), "A b: id: small letters"),
    ],
)
def test_a_wrong_table_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(TableError, match=complaint):
        parse(text)


def _frame(rank: int, path: str, source: str) -> str:
    head = f"(Worker_TP{rank} pid=4{rank}) ERROR 11-04 [multiproc_executor.py:711] "
    return f'{head}  File "/opt/v/vllm/{path}", line 12, in f\n{head}    {source}\n'


def test_an_exception_is_known_by_the_file_that_it_comes_from() -> None:
    quantisation = "model_executor/layers/quantization/fp8.py"
    error = "(Worker_TP{}) ERROR [x.py:1] ValueError: the moon is too bright\n"
    text = _frame(0, "v1/worker/gpu_worker.py", "self.load()")
    text += _frame(0, quantisation, "raise ValueError(") + error.format(0)
    (found,) = match(text)
    assert (found.id, found.rank) == ("quantisation-refused", Rank.TRACE)
    assert found.line.endswith("ValueError: the moon is too bright")
    # Several ranks print at once, and libraries stand between.
    two = _frame(0, quantisation, "raise ValueError(") + _frame(1, "v1/x.py", "raise ValueError(")
    assert match(two + error.format(0) + error.format(1))[0].id == "quantisation-refused"
    # A known line is a better answer, and what only points upwards is none.
    known = match(text + "ValueError: No available memory for the cache blocks.\n")
    assert [m.id for m in known] == ["no-kv-memory", "quantisation-refused"]
    points = "RuntimeError: Worker failed with error 'a', please check the stack trace above\n"
    (only,) = match(_frame(0, "v1/executor/multiproc_executor.py", "raise RuntimeError(") + points)
    assert only.rank is Rank.GENERIC
    # A traceback that was cut off before its exception tells nothing.
    assert match(_frame(0, quantisation, "raise ValueError(")) == []


def test_the_last_error_in_words_of_its_own_is_told() -> None:
    own = "(EngineCore pid=7) ERROR 11-02 [core.py:1] ValueError: the moon is too bright\n"
    assert last_error(BOOT + own + LAST_LINES) == "ValueError: the moon is too bright"
    assert last_error("vllm: error: the moon is up\n" + LAST_LINES) == ("error: the moon is up")
    ours = "warmup: air-a: FAILED: warm-up request `chat`: /v1/chat answered 500\n"
    assert last_error(ours + LAST_LINES).endswith("`chat`: /v1/chat answered 500")
    # What only points upwards is not the cause.
    points = "warmup: air-a: FAILED: vLLM ended during its start; its own lines above say why\n"
    assert last_error(own + points + LAST_LINES) == "ValueError: the moon is too bright"
    assert match(own + points + LAST_LINES)[0].rank is Rank.GENERIC
    assert last_error(BOOT + LAST_LINES) == ""


SILENT = "(EngineCore pid=3) INFO No available shared memory broadcast block found in 60 seconds.\n"
STARTED = "(APIServer pid=2) INFO:     Application startup complete.\n"


def test_what_a_server_got_through_is_over_and_what_comes_later_is_not() -> None:
    assert match(SILENT + STARTED) == []
    assert [one.id for one in match(SILENT + STARTED + SILENT)] == ["worker-silent"]
    assert [one.id for one in match(STARTED + SILENT)] == ["worker-silent"]


@pytest.mark.parametrize("quote", ['"', "'"])
def test_what_a_model_says_is_no_line_of_a_log(quote: str) -> None:
    said = "it says RuntimeError: CUDA error: out of memory, and then stops"
    answer = f"{{{quote}content{quote}: {quote}{said}{quote}}}"
    assert match(answer) == []
    assert {one.line for one in match(f"{answer} {said}")} == {f"{answer} {said}"}
