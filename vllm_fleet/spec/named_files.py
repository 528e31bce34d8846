"""Checks of the operator's own files that settings name: keys, certificates, locks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from vllm_fleet.spec.complaints import Complaint
from vllm_fleet.spec.entries import secret_value
from vllm_fleet.spec.findings import At, Findings, placed
from vllm_fleet.spec.layers import Loaded, LoadedHost


def check_named_files(found: Findings, loaded: Loaded, *, locks: bool = True) -> None:
    """The operator's own files that settings name, relative to the root."""
    for host in loaded.hosts:
        groups, settings = host.host.groups, host.settings
        named: list[tuple[tuple[str, ...], str | None]] = []
        if "gateway" in groups:
            if settings.api_keys is not None:
                named.append((("api_keys", "file"), settings.api_keys.file))
            if settings.gateway.tls is not None:
                tls = settings.gateway.tls
                named.append((("gateway", "tls", "certificate"), tls.certificate))
                named.append((("gateway", "tls", "key"), tls.key))
        if "gpu" in groups:
            hub = settings.hub
            named.append((("hub", "token_file"), hub.token_file))
            named.append((("hub", "huggingface_token_file"), hub.huggingface_token_file))
        if "monitoring" in groups and settings.monitoring.grafana is not None:
            key_file = settings.monitoring.grafana.key_file
            named.append((("monitoring", "grafana", "key_file"), key_file))
        for loc, name in named:
            if name is None:
                continue
            path = loaded.root / name
            at = At(host.sources[loc[0]], loc)
            if secret_value(name):
                found.say(at, "must be the name of a file that holds the secret")
            elif problem := _unreadable(path):
                text = f'"{name}" {problem}; it is looked for below {loaded.root}'
                found.say(at, text)
            elif loc == ("api_keys", "file"):
                _key_file(found, path, name)
        if locks:
            _locks(found, loaded, host)


def _unreadable(path: Path) -> str | None:
    if not path.exists():
        return "does not exist"
    if not path.is_file():
        return "is not a file"
    try:
        with path.open("rb") as stream:
            empty = not stream.read(1)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "is empty" if empty else None


def _locks(found: Findings, loaded: Loaded, host: LoadedHost) -> None:
    """The lock file of every release that a host is to have."""
    pattern = host.settings.vllm_lock
    if pattern is None:
        return
    for _, instance in placed(host):
        model = host.settings.models.get(instance.model)
        version = (
            instance.vllm_version
            or (model.vllm_version if model else None)
            or host.settings.vllm_version
        )
        if version is None:
            continue
        name = pattern.replace("{version}", version)
        if problem := _unreadable(loaded.root / name):
            at = At(host.sources["vllm_lock"], ("vllm_lock",))
            text = f'"{name}" {problem}; `fleet lock {version}` makes it'
            found.say(at, text)


def _key_file(found: Findings, path: Path, name: str) -> None:
    """Keys of clients: a list of {name, key}, each once. Never repeats a key."""

    def say(mark: Any, text: str) -> None:
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        found.add(Complaint(name, line, column, "", ""), text)

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        return say(None, "is not UTF-8 text")
    except yaml.YAMLError as error:  # its text would show what stands there
        return say(getattr(error, "problem_mark", None), "is not YAML here")
    shape = 'must be a list of {name: "...", key: "..."}'
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        return say(root.start_mark if root else None, shape)
    seen: dict[tuple[str, str], int] = {}
    for item in root.value:
        pairs = item.value if isinstance(item, yaml.MappingNode) else []
        if sorted(str(key.value) for key, _ in pairs) != ["key", "name"]:
            say(item.start_mark, shape)
            continue
        for key, value in pairs:
            if not isinstance(value, yaml.ScalarNode) or not value.tag.endswith(":str"):
                say(value.start_mark, f"the {key.value} must be text; put it in quotes")
            elif not re.fullmatch(r"[\x21-\x7e]+", value.value):
                say(value.start_mark, f"the {key.value} must be visible ASCII without spaces")
            elif first := seen.get((key.value, value.value)):
                say(value.start_mark, f"the {key.value} stands in line {first} already")
            else:
                seen[key.value, value.value] = value.start_mark.line + 1
    return None
