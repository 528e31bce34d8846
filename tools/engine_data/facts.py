"""What else a release knows: architectures, parsers, metrics, defaults, requirements."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tools.engine_data.source import Hint, Sources

REGISTRY = "vllm.model_executor.models.registry"
# What the Prometheus client and the HTTP instrumentation add on their own.
PROCESS_METRICS = {
    "python_gc_objects_collected_total": "counter",
    "python_gc_objects_uncollectable_total": "counter",
    "python_gc_collections_total": "counter",
    "python_info": "gauge",
    "process_virtual_memory_bytes": "gauge",
    "process_resident_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge",
    "process_cpu_seconds_total": "counter",
    "process_open_fds": "gauge",
    "process_max_fds": "gauge",
}
HTTP_METRICS = {
    "http_requests_total": "counter",
    "http_requests_created": "gauge",
    "http_request_size_bytes": "summary",
    "http_request_size_bytes_created": "gauge",
    "http_response_size_bytes": "summary",
    "http_response_size_bytes_created": "gauge",
    "http_request_duration_highr_seconds": "histogram",
    "http_request_duration_highr_seconds_created": "gauge",
    "http_request_duration_seconds": "histogram",
    "http_request_duration_seconds_created": "gauge",
}
# Modules whose metrics stand in every server; those of other modules need a feature switched on.
ALWAYS = ("vllm/v1/metrics/loggers.py", "vllm/v1/metrics/perf.py")


def architectures(sources: Sources) -> dict[str, list[str]]:
    """Architectures by the part of vLLM's registry that lists them."""
    names = sources.names(REGISTRY)
    merged = names["_VLLM_MODELS"]
    assert isinstance(merged, ast.Dict)
    result = {}
    for value in merged.values:
        assert isinstance(value, ast.Name)
        part = value.id.strip("_").removesuffix("_MODELS").lower()
        result[part] = sorted(_keys(sources, REGISTRY, names[value.id]))
    return result


def removed_architectures(sources: Sources) -> dict[str, str]:
    """Architectures that vLLM dropped, and the last version that had each."""
    node = sources.names(REGISTRY).get("_PREVIOUSLY_SUPPORTED_MODELS")
    if not isinstance(node, ast.Dict):
        return {}
    return {
        str(key.value): str(value.value)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
    }


def parsers(sources: Sources) -> dict[str, list[str]]:
    """Names of the tool and reasoning parsers that are built in."""
    found = {}
    for kind, module, name in (
        ("tool", "vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
        ("reasoning", "vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
    ):
        found[kind] = sorted(_keys(sources, module, sources.names(module)[name]))
    return found


def values(sources: Sources) -> dict[str, list[str]]:
    """Values an option takes although its parser takes any text."""
    backends = _literal(sources, "vllm.config.parallel", "DistributedExecutorBackend")
    found = {
        "quantization": _literal(
            sources, "vllm.model_executor.layers.quantization", "QuantizationMethods"
        ),
        "deprecated_quantization": _strings(
            sources.names("vllm.model_executor.layers.quantization").get(
                "DEPRECATED_QUANTIZATION_METHODS"
            )
        ),
        "distributed_executor_backend": backends,
        "attention_backend": _enum(
            sources, "vllm.v1.attention.backends.registry", "AttentionBackendEnum"
        ),
        "load_format": _literal(sources, "vllm.model_executor.model_loader", "LoadFormats"),
        "optimization_level": ["0", "1", "2", "3"],
    }
    return {k: v for k, v in found.items() if v}


def metrics(sources: Sources) -> tuple[dict[str, str], dict[str, str]]:
    """Exposed metric names and types: those of every server, and those of some."""
    always: dict[str, str] = dict(PROCESS_METRICS)
    sometimes: dict[str, str] = {}
    for file, text in sorted(sources.texts.items()):
        if "vllm:" not in text or not file.endswith(".py"):
            continue
        module = file.removesuffix(".py").replace("/", ".")
        tree = sources.tree(module.removesuffix(".__init__"))
        for call, conditional in _calls(tree, file):
            kind = _metric_kind(call)
            for name in _metric_names(call, tree) if kind else ():
                if file in ALWAYS and not conditional:
                    always.update(_exposed(name, kind))
                else:
                    sometimes.update(_exposed(name, kind))
    always.update(HTTP_METRICS)
    return always, {k: v for k, v in sorted(sometimes.items()) if k not in always}


def batch_defaults(sources: Sources) -> list[dict[str, Any]]:
    """Rules for max_num_batched_tokens and max_num_seqs of a server on GPUs; first match holds.

    Raises LookupError for a condition that is not known here, so that no rule is dropped.
    """
    found = sources.lookup("vllm.engine.arg_utils", "EngineArgs")
    assert found is not None
    assert isinstance(found.node, ast.ClassDef)
    function = next(
        n
        for n in found.node.body
        if isinstance(n, ast.FunctionDef) and n.name == "get_batch_defaults"
    )
    chain: ast.If | None = next(
        n for n in function.body if isinstance(n, ast.If) and "device_memory" in ast.unparse(n.test)
    )
    rules = []
    while chain is not None:
        rule: dict[str, Any] = {}
        test = ast.unparse(chain.test)
        for part in test.split(" and "):
            if match := re.fullmatch(r"device_memory >= (\d+) \* GiB_bytes", part):
                rule["min_gib"] = int(match[1])
            elif match := re.fullmatch(r"'(\w+)' not in device_name", part):
                rule["not_named"] = match[1]
            elif part.strip("()") == "not is_gb10":
                rule["not_capability"] = "12.1"
            else:
                raise LookupError(f"get_batch_defaults asks {part}")
        rule.update(_server_values(chain.body))
        rules.append(rule)
        if len(chain.orelse) == 1 and isinstance(chain.orelse[0], ast.If):
            chain = chain.orelse[0]
        else:
            rules.append(_server_values(chain.orelse))
            chain = None
    return rules


def class_constants(sources: Sources, module: str, name: str) -> dict[str, Any]:
    """Constants of a class body: ``DEFAULT_BLOCK_SIZE: ClassVar[int] = 16``."""
    _, node = sources.get_class(module, name)
    return {
        statement.target.id: statement.value.value
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and ast.unparse(statement.annotation).startswith("ClassVar")
        and isinstance(statement.value, ast.Constant)
    }


def sampling_parameters(sources: Sources) -> list[str]:
    """Fields of ``SamplingParams``: what a request may ask of sampling."""
    _, node = sources.get_class("vllm.sampling_params", "SamplingParams")
    return sorted(
        s.target.id
        for s in node.body
        if isinstance(s, ast.AnnAssign)
        and isinstance(s.target, ast.Name)
        and not s.target.id.startswith("_")
    )


def requirements(filename: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """What the wheel asks of a host: Python, glibc, the libraries that fix CUDA."""
    glibc = re.search(r"manylinux_(\d+)_(\d+)_", filename)
    wanted = {}
    for line in metadata.get("requires_dist", []):
        if "extra ==" in line:
            continue
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)", line)
        if match and match[1].lower() in {"torch", "transformers", "flashinfer-python"}:
            wanted[match[1].lower()] = match[2].strip()
    return {
        "python": ",".join(sorted(metadata["requires_python"].split(","), reverse=True)),
        "glibc": f"{glibc[1]}.{glibc[2]}" if glibc else None,
        "torch": wanted["torch"].removeprefix("=="),
        "transformers": wanted.get("transformers"),
        "flashinfer": wanted.get("flashinfer-python", "").removeprefix("==") or None,
    }


def cuda_of_torch(metadata: dict[str, Any]) -> str:
    """CUDA that a torch wheel brings, from the runtime it requires: "12.8", "13.0"."""
    for line in metadata.get("requires_dist", []):
        if match := re.match(
            r"(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit)\S*?==(\d+\.\d+)", line
        ):
            return match[1]
    raise LookupError("this torch names no CUDA runtime")


def capabilities(found: Counter[tuple[str, int]]) -> list[str]:
    """Compute capabilities a shared object serves, as "8.0"; stubs of the linker left out."""
    code = {arch: n for (kind, arch), n in found.items() if kind == "sm"}
    most = max(code.values())
    return [f"{a // 10}.{a % 10}" for a, n in sorted(code.items()) if n * 10 >= most]


def _keys(sources: Sources, module: str, node: ast.AST) -> Iterator[str]:
    assert isinstance(node, ast.Dict)
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            yield str(key.value)
        elif key is None and isinstance(value, ast.Name):
            yield from _keys(sources, module, sources.names(module)[value.id])
        elif key is None and isinstance(value, ast.DictComp):
            yield from _filtered(sources, module, value)
        else:
            raise LookupError(f"{module} has a key that is no text: {ast.unparse(value)}")


def _filtered(sources: Sources, module: str, node: ast.DictComp) -> Iterator[str]:
    """Keys of ``{k: ... for k, (mod, arch) in MODELS.items() if arch == "Name"}``."""
    source = re.fullmatch(r"(\w+)\.items\(\)", ast.unparse(node.generators[0].iter))
    test = re.fullmatch(r"arch == '(\w+)'", " ".join(map(ast.unparse, node.generators[0].ifs)))
    models = sources.names(module).get(source[1]) if source else None
    if test is None or not isinstance(models, ast.Dict):
        raise LookupError(f"{module} filters in a way not known here: {ast.unparse(node)}")
    for key, value in zip(models.keys, models.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
            name = value.elts[1]
            if isinstance(name, ast.Constant) and name.value == test[1]:
                yield str(key.value)


def _literal(sources: Sources, module: str, name: str) -> list[str]:
    if sources.file(module) is None:
        return []
    node = sources.names(module).get(name)
    hints = sources.hints(module, node) if node is not None else frozenset[Hint]()
    return [str(v) for h in hints for v in h.values]


def _strings(node: ast.AST | None) -> list[str]:
    return [str(e.value) for e in ast.walk(node) if isinstance(e, ast.Constant)] if node else []


def _enum(sources: Sources, module: str, name: str) -> list[str]:
    if sources.file(module) is None:
        return []
    _, node = sources.get_class(module, name)
    return [
        target.id
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]


def _server_values(body: list[ast.stmt]) -> dict[str, int]:
    found: dict[str, int] = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            assert isinstance(statement.targets[0], ast.Name)
            for key, value in zip(statement.value.keys, statement.value.values, strict=True):
                if key is not None and ast.unparse(key) == "UsageContext.OPENAI_API_SERVER":
                    assert isinstance(value, ast.Constant)
                    assert isinstance(value.value, int)
                    name = statement.targets[0].id.removeprefix("default_")
                    found[name] = value.value
    return found


def _calls(tree: ast.AST, file: str, conditional: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Calls of a module, and whether an ``if`` decides over each."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Call):
            yield child, conditional
        yield from _calls(child, file, conditional or isinstance(tree, ast.If))


def _metric_kind(call: ast.Call) -> str:
    name = ast.unparse(call.func).rsplit(".", 1)[-1].removeprefix("_").lower().removesuffix("_cls")
    return name if name in {"gauge", "counter", "histogram"} else ""


def _metric_names(call: ast.Call, tree: ast.Module) -> Iterator[str]:
    given = next((k.value for k in call.keywords if k.arg == "name"), None)
    given = given or (call.args[0] if call.args else None)
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        if given.value.startswith("vllm:"):
            yield given.value
    elif isinstance(given, ast.Name | ast.Attribute):
        wanted = given.id if isinstance(given, ast.Name) else given.attr
        # A name: the texts assigned to it, or those of the pairs it is drawn from.
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and wanted in map(_target, node.targets):
                yield from _vllm_names(node.value)
            elif isinstance(node, ast.comprehension) and wanted in ast.unparse(node.target):
                for other in ast.walk(tree):
                    if isinstance(other, ast.Assign) and ast.unparse(node.iter) in map(
                        _target, other.targets
                    ):
                        yield from _vllm_names(other.value)


def _target(node: ast.expr) -> str:
    return ast.unparse(node)


def _vllm_names(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Constant)
            and isinstance(inner.value, str)
            and re.fullmatch(r"vllm:\w+", inner.value)
        ):
            yield inner.value


def _exposed(name: str, kind: str) -> dict[str, str]:
    """Names as /metrics shows them, the client's ``_total`` and ``_created`` included."""
    if kind == "counter":
        base = name.removesuffix("_total")
        return {f"{base}_total": "counter", f"{base}_created": "gauge"}
    if kind == "histogram":
        return {name: "histogram", f"{name}_created": "gauge"}
    return {name: "gauge"}
