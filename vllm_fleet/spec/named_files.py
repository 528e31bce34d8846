"""Checks of the operator's own files that settings name: keys, certificates, locks."""

from __future__ import annotations

from pathlib import Path

from vllm_fleet import engine
from vllm_fleet.spec.entries import secret_value
from vllm_fleet.spec.findings import At, Findings, placed
from vllm_fleet.spec.inputs import alerting_files
from vllm_fleet.spec.keys_file import read_keys
from vllm_fleet.spec.layers import Loaded, LoadedHost


def check_named_files(found: Findings, loaded: Loaded, *, locks: bool = True) -> None:
    """The operator's own files that settings name, relative to the root."""
    names = _client_names(loaded)
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
            if settings.gateway.keepalived is not None:
                password = settings.gateway.keepalived.password_file
                named.append((("gateway", "keepalived", "password_file"), password))
        if "gpu" in groups:
            hub = settings.hub
            named.append((("hub", "token_file"), hub.token_file))
            named.append((("hub", "huggingface_token_file"), hub.huggingface_token_file))
        if "monitoring" in groups and settings.monitoring.grafana is not None:
            key_file = settings.monitoring.grafana.key_file
            named.append((("monitoring", "grafana", "key_file"), key_file))
        if "monitoring" in groups:
            named += [
                (("monitoring", "alerting", *where), name)
                for where, name in alerting_files(settings.monitoring.alerting)
            ]
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
                for complaint in read_keys(path, name, names).complaints:
                    found.add(complaint, complaint.text)
        if locks:
            _locks(found, loaded, host)


def _client_names(loaded: Loaded) -> list[str] | None:
    """The names that clients may give as model; None where a mistake hides some."""
    if any("models" in host.unsound for host in loaded.hosts):
        return None
    names: dict[str, None] = {}
    for host in loaded.hosts:
        layer = host.sources.get("models")
        if layer is None:
            continue
        names.update(dict.fromkeys(layer.broken_models))
        for name, model in layer.models.items():
            adapters = (*model.adapters, *engine.lora_names(model.vllm_args))
            names.update(dict.fromkeys((name, *model.aliases, *adapters)))
        for _, instance in placed(host):
            names.update(dict.fromkeys(engine.lora_names(instance.vllm_args)))
    return list(names)


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
