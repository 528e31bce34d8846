"""The command line of ``vllm serve`` for one planned instance. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from vllm_fleet import paths
from vllm_fleet.planned import PlannedInstance, PlannedSpan

# Options that decide where the server listens, what it is called and who may ask: they come
# from the spec's own keys, and two sources would disagree one day. Keys and tokens never
# stand in argv, where every user of the host can read them.
RESERVED = {
    "host": "every instance listens on all addresses of its host",
    "port": "set `port` of the instance",
    "uds": "gateways reach an instance by its port",
    "root-path": "the gateway sends the plain paths",
    "model": "set `repo` of the model",
    "served-model-name": "the model's name and `aliases` are used",
    "trust-remote-code": "set `trust_remote_code` of the model",
    "config": "write the options themselves into `vllm_args`",
    "api-key": "clients' keys are checked by the gateway: set `api_keys`",
    "hf-token": "weights are fetched before the start: set `hub`",
    "ssl-keyfile": "TLS ends at the gateway: set `gateway.tls`",
    "ssl-certfile": "TLS ends at the gateway: set `gateway.tls`",
}
# Bare flags without a `--no-` form in vLLM 0.18 to 0.33; false leaves them out.
ONE_WAY = frozenset(
    {
        "aggregate-engine-logging",
        "data-parallel-multi-port-external-lb",
        "disable-log-stats",
        "grpc",
        "headless",
    }
)
# What makes a span of several instances; its `span` says it once for all of them.
SPAN_OPTIONS = frozenset(
    {
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "data-parallel-size-local",
        "data-parallel-backend",
        "data-parallel-address",
        "data-parallel-rpc-port",
        "data-parallel-rank",
        "data-parallel-start-rank",
        "data-parallel-external-lb",
        "data-parallel-hybrid-lb",
        "distributed-executor-backend",
        "nnodes",
        "node-rank",
        "master-addr",
        "master-port",
        "headless",
    }
)
# Refused with `--headless`, which has no server.
SERVERS_ALONE = frozenset({"api-server-count"})
# With one of these, ranks may be on other hosts than the instance's own.
ELSEWHERE = frozenset({"nnodes", "data-parallel-size-local", "distributed-executor-backend"})
REPEATED = frozenset({"middleware"})  # one value each, may be given several times
GATE = "gate.Gate"  # in paths.LIB, which is on PYTHONPATH
# How long the server keeps an idle connection; gateways close theirs long before, as a request
# that is sent while the server closes is lost.
KEEP_ALIVE, KEEP_ALIVE_SECONDS = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", 120

_NAME = re.compile(r"[a-z0-9][A-Za-z0-9.+-]*")


class EngineError(ValueError):
    """An option of ``vllm_args`` that cannot be passed on; says which and what to do."""


def options(args: Mapping[str, object]) -> dict[str, object]:
    """``vllm_args`` by long name with dashes; refuses what is reserved or no name.

    Raises :class:`EngineError`.
    """
    named: dict[str, object] = {}
    for key, value in args.items():
        head, dot, rest = key.partition(".")
        name = head.replace("_", "-") + dot + rest  # as vLLM: `--a-b.key_of_json`
        if not _NAME.fullmatch(name.replace("_", "-")):
            raise EngineError(
                f"vllm_args: {key!r} is no option name; write it without dashes in front, "
                "such as `max-num-seqs`"
            )
        plain = name.removeprefix("no-")
        if plain in RESERVED:
            raise EngineError(f"vllm_args: `{key}` cannot be set here: {RESERVED[plain]}")
        if name in named:
            raise EngineError(f"vllm_args: `{key}` is given twice, with dash and underscore")
        named[name] = value
    return named


def command(instance: PlannedInstance) -> list[list[str]]:
    """The words of the command, one inner list a line: the program first, then an option each.

    Raises :class:`EngineError` on an option that cannot be passed on.
    """
    given = options(instance.args)
    model = instance.model
    lines = [
        [f"{paths.RELEASES}/{instance.release}/bin/vllm", "serve", instance.weights],
        ["--host", "0.0.0.0"],
        ["--port", str(instance.port)],
        ["--served-model-name", instance.model_name, *model.aliases],
    ]
    if isinstance(model.max_model_len, int) and "max-model-len" not in given:
        lines.append(["--max-model-len", str(model.max_model_len)])
    if instance.span is not None:
        lines += _span_lines(instance.span)
    elif instance.cards and "tensor-parallel-size" not in given:
        lines.append(["--tensor-parallel-size", str(_tensor_parallel(instance, given))])
    elif instance.cards and (problem := too_many_ranks(given, len(instance.cards))):
        raise EngineError(f"instance {instance.name} on {instance.host}: {problem}")
    if instance.span is not None and (ours := SPAN_OPTIONS & set(given)):
        raise EngineError(
            f"instance {instance.name} on {instance.host}: vllm_args: `{min(ours)}` of a span is "
            "set by its `span`"
        )
    if model.task != "chat" and "runner" not in given:
        lines.append(["--runner", "pooling"])
    if model.trust_remote_code:
        lines.append(["--trust-remote-code"])
    for name, value in given.items():
        if instance.answers or name not in SERVERS_ALONE:
            lines.extend(option_words(name, value))
    if "disable-uvicorn-access-log" not in given:
        # Two lines a second of gateways and monitors would hide what matters in the journal;
        # who asked what stands in the gateway's log.
        lines.append(["--disable-uvicorn-access-log"])
    # vLLM puts the middleware named last around all others: nothing gets past the gate.
    lines.append(["--middleware", GATE])
    return lines


def _span_lines(span: PlannedSpan) -> list[list[str]]:
    """Options by which the ranks of a span are one server."""
    settings = span.settings
    lines = [
        ["--tensor-parallel-size", str(span.tensor_parallel)],
        ["--pipeline-parallel-size", str(span.pipeline_parallel)],
    ]
    if settings.data_parallel > 1:
        lines.append(["--data-parallel-size", str(settings.data_parallel)])
    if settings.executor == "ray":
        return [*lines, ["--distributed-executor-backend", "ray"]]
    lines += [
        ["--distributed-executor-backend", "mp"],
        ["--nnodes", str(len(span.hosts))],
        ["--node-rank", str(span.rank)],
        ["--master-addr", span.addresses[0]],
        ["--master-port", str(settings.master_port)],
    ]
    if settings.data_parallel > 1:
        lines.append(["--data-parallel-rpc-port", str(settings.data_port)])
    if span.rank:
        lines.append(["--headless"])
    return lines


def shell(lines: list[list[str]]) -> str:
    """The command as shell text, one option a line, every word quoted as it needs."""
    return " \\\n  ".join(shlex.join(words) for words in lines)


def has_tools(args: Mapping[str, object]) -> bool:
    """Whether the options make the server answer with tool calls."""
    given = options(args)
    return bool(given.get("enable-auto-tool-choice")) and "tool-call-parser" in given


def too_many_ranks(given: Mapping[str, object], cards: int) -> str | None:
    """Why options by long name ask for more ranks than there are cards; None where they do not."""
    names = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    ranks = _product(given, names)
    if ranks <= cards or ELSEWHERE & set(given):
        return None
    shown = " x ".join(name for name in names if name in given)
    return f"{shown} = {ranks} is more than its {cards} cards; change `cards` or these `vllm_args`"


def _product(given: Mapping[str, object], names: Iterable[str]) -> int:
    product = 1
    for name in names:
        value = given.get(name)
        if isinstance(value, str) and value.isdecimal():
            value = int(value[:9])
        product *= value if isinstance(value, int) and value > 0 else 1
    return product


def _tensor_parallel(instance: PlannedInstance, given: Mapping[str, object]) -> int:
    """Cards left for each replica and stage; all cards where nothing else divides them."""
    share = _product(given, ("pipeline-parallel-size", "data-parallel-size"))
    if len(instance.cards) % share:
        raise EngineError(
            f"instance {instance.name} on {instance.host}: {len(instance.cards)} cards cannot be "
            f"divided by pipeline-parallel-size x data-parallel-size = {share}; "
            "change `cards` or these `vllm_args`"
        )
    return len(instance.cards) // share


def option_words(name: str, value: object) -> Iterator[list[str]]:
    """The words of one option of ``vllm_args``, by long name; none where it is left out."""
    if value is None:
        return
    if value is True:
        yield [f"--{name}"]
    elif value is False:
        if name.startswith("no-"):
            yield [f"--{name.removeprefix('no-')}"]
        elif name not in ONE_WAY:
            yield [f"--no-{name}"]
    elif isinstance(value, list | tuple):
        words = [_text(item) for item in value]
        if name in REPEATED:
            yield from ([f"--{name}", word] for word in words)
        elif words:
            yield [f"--{name}", *words]
    else:
        word = _text(value)
        # argparse takes a separate word with a leading dash for the next option
        yield [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]


def _text(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def lora_names(args: Mapping[str, object]) -> set[str]:
    """Names of the LoRA adapters that options of vLLM load: `name=path`, or a mapping with `name`.

    A mapping may be written as JSON, and the option with either kind of dash; what is neither is
    a complaint of its own, and names nothing.
    """
    given = args.get("lora-modules", args.get("lora_modules"))
    names = set()
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str) and one.lstrip().startswith("{"):
            with suppress(ValueError):
                one = json.loads(one)
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            names.add(one["name"])
        elif isinstance(one, str) and "=" in one:
            names.add(one.partition("=")[0])
    return names
