"""Checks of one file of group_vars: its models and instances, one by one."""

from __future__ import annotations

import re
from typing import Any

from vllm_fleet.spec.complaints import Loc
from vllm_fleet.spec.findings import At, Findings
from vllm_fleet.spec.layers import Layer
from vllm_fleet.spec.model import COMMIT, Model
from vllm_fleet.spec.yamlfile import Node

# Options of `vllm serve` that the launch script sets itself, and what to use instead.
OWN_ARGS = {
    "model": "the weights come from `source`, `repo` and `revision` of the model",
    "served-model-name": "the name is the model's key in `models`, further ones its `aliases`",
    "port": "the port is `port` of the instance",
    "host": "the instance listens where gateways and monitors reach it",
    "uds": "the instance listens on its `port`",
    "root-path": "the gateway passes paths on unchanged",
    "middleware": "the gate that keeps cold traffic away is put there",
    "api-key": "keys are checked at the gateway; see `api_keys`",
    "hf-token": "weights are fetched before the start; see `hub`",
    "ssl-keyfile": "TLS ends at the gateway; see `gateway.tls`",
    "ssl-certfile": "TLS ends at the gateway; see `gateway.tls`",
    "config": "a file would bypass these checks; write its options here",
    "revision": "it is `revision` of the model",
    "trust-remote-code": "it is `trust_remote_code` of the model",
}
# Environment that the env file sets itself.
OWN_ENV = {
    "CUDA_VISIBLE_DEVICES": "it follows from `cards`",
    "HIP_VISIBLE_DEVICES": "it follows from `cards`",
    "ROCR_VISIBLE_DEVICES": "it follows from `cards`",
    "NVIDIA_VISIBLE_DEVICES": "it follows from `cards`",
    "CUDA_DEVICE_ORDER": "it is always PCI_BUS_ID, so that indices are those of nvidia-smi",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "gateways close idle connections before the engine does",
    "HOME": "it is the instance's own directory",
    "PATH": "it is that of the release",
    "VIRTUAL_ENV": "it is that of the release",
    **dict.fromkeys(
        (
            "CUDA_CACHE_PATH",
            "DG_JIT_CACHE_DIR",
            "FLASHINFER_WORKSPACE_BASE",
            "NUMBA_CACHE_DIR",
            "OUTLINES_CACHE_DIR",
            "TILELANG_CACHE_DIR",
            "TORCHINDUCTOR_CACHE_DIR",
            "TORCH_EXTENSIONS_DIR",
            "TRITON_CACHE_DIR",
            "VLLM_CACHE_ROOT",
            "XDG_CACHE_HOME",
        ),
        "caches are kept by release in the instance's own directory",
    ),
    "HF_HOME": "weights are downloaded by deploy.py alone",
    "MODELSCOPE_CACHE": "weights are downloaded by deploy.py alone",
}
_SECRET_ENV = re.compile(r"(^|_)(API_?KEY|ACCESS_KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS)$")
_SECRET_VALUE = re.compile(r"^(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|ms-[0-9a-f-]{30,})$")
_REPOSITORY = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
_ARG = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")


def check_entries(found: Findings, layer: Layer) -> None:
    """Complain of what is wrong in a model or an instance whatever the hosts are."""
    for name, model in layer.models.items():
        loc: Loc = ("models", name)
        _model(found, layer, loc, model)
        _options(found, layer, loc)
    for number, instance in layer.instances:
        loc = ("instances", number)
        _options(found, layer, loc)
        seen: set[str] = set()
        for index, host in enumerate(instance.hosts):
            if host in seen:
                found.say(At(layer, (*loc, "hosts", index)), f"names {host} twice")
            seen.add(host)


def _model(found: Findings, layer: Layer, loc: Loc, model: Model) -> None:
    if model.source == "path":
        if not model.repo.startswith("/"):
            text = "must be an absolute path on the hosts, as `source` is path"
            found.say(At(layer, (*loc, "repo")), text)
    else:
        if model.repo.startswith(("/", ".", "~")):
            text = "is a directory; say so with `source: path`, or name a repository"
            found.say(At(layer, (*loc, "repo")), text)
        elif not _REPOSITORY.match(model.repo):
            text = 'must be a repository as "OWNER/NAME"'
            found.say(At(layer, (*loc, "repo")), text)
        if model.trust_remote_code and not COMMIT.match(model.revision):
            text = (
                "runs code of the repository, which a tag or branch does not pin; "
                "write a commit (40 hex digits) as revision"
            )
            found.say(At(layer, (*loc, "trust_remote_code")), text)


def _options(found: Findings, layer: Layer, loc: Loc) -> None:
    """Options and environment that are ours, cannot be written so, or hold a secret.

    Looks at what is written, so that a mistake elsewhere in ``vllm_args`` or ``env`` hides none.
    """
    owner = layer.document.root.at(loc)
    spelt: dict[str, str] = {}
    for name in _keys(owner, "vllm_args"):
        at = At(layer, (*loc, "vllm_args", name))
        plain = name.lstrip("-").replace("_", "-").lower()
        first = spelt.setdefault(plain, name)
        plain = plain.removeprefix("no-")
        value = owner.items["vllm_args"].items[name].value
        if plain in OWN_ARGS:
            found.say(at, f"is set by us; {OWN_ARGS[plain]}", at_key=True)
        elif loc[0] == "models" and plain == "max-model-len":
            found.say(at, "is set by us; it is `max_model_len` of the model", at_key=True)
        elif name.startswith("-"):
            text = f'write the option without leading dashes: "{name.lstrip("-")}"'
            found.say(at, text, at_key=True)
        elif not _ARG.match(name):
            found.say(at, "is not the name of an option", at_key=True)
        elif first != name:
            found.say(at, f'is the same option as "{first}"; write it once', at_key=True)
        elif secret_value(value):
            found.say(at, SECRET_TEXT)
        elif holds_nul(value):
            found.say(at, "must not hold a NUL character")
    for name in _keys(owner, "env"):
        at = At(layer, (*loc, "env", name))
        if name.startswith("FLEET_"):
            found.say(at, "is set by us: names that begin with FLEET_ are ours", at_key=True)
        elif name in OWN_ENV:
            found.say(at, f"is set by us; {OWN_ENV[name]}", at_key=True)
        elif name == "VLLM_API_KEY":
            text = "keys are checked at the gateway; name their file in api_keys.file"
            found.say(at, text, at_key=True)
        elif _SECRET_ENV.search(name) or secret_value(owner.items["env"].items[name].value):
            found.say(at, SECRET_TEXT, at_key=True)


def _keys(owner: Node, field: str) -> list[str]:
    return list(owner.items[field].keys) if field in owner.items else []


SECRET_TEXT = (
    "a secret never stands in group_vars; put a hub's token in a file "
    "and name that file in hub.token_file"
)


def secret_value(value: Any) -> bool:
    return isinstance(value, str) and bool(_SECRET_VALUE.match(value))


def holds_nul(value: Any) -> bool:
    """Whether a text in a value holds a NUL, which no command line can carry."""
    if isinstance(value, dict):
        return any(map(holds_nul, [*value, *value.values()]))
    if isinstance(value, (list, tuple)):
        return any(map(holds_nul, value))
    return isinstance(value, str) and "\0" in value
