"""The files beside group_vars that a run reads: locks, keys, certificates, placement, configs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_fleet import listings, paths, weights
from vllm_fleet.jsontext import parsed
from vllm_fleet.placement import Placement, read_placement
from vllm_fleet.spec.complaints import Complaint, SpecError
from vllm_fleet.spec.keys_file import read_keys
from vllm_fleet.spec.model import Alerting, ApiKey, Fleet, HostSpec, Instance, Model
from vllm_fleet.weights import Listing


@dataclass(frozen=True)
class Inputs:
    """Texts by the path that the spec writes; locks by the path with its version filled in."""

    locks: dict[str, str] = field(default_factory=dict)
    keys: dict[str, tuple[ApiKey, ...]] = field(default_factory=dict)
    tls: dict[str, str] = field(default_factory=dict)
    vrrp: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    alerting: dict[str, str] = field(default_factory=dict)  # secrets of receivers
    apt_keys: dict[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)  # by config_path
    listings: dict[str, Listing] = field(default_factory=dict)  # by listings.path_of
    packages_lists: dict[str, str] = field(default_factory=dict)  # of bundles, by system

    def lock(self, spec: HostSpec, version: str) -> str | None:
        """Text of the lock that a host uses for a version; None where it uses none."""
        path = spec.settings.vllm_lock
        return self.locks[lock_path(path, version)] if path else None

    def gateway_keys(self, spec: HostSpec) -> tuple[ApiKey, ...]:
        """Keys of the clients of a gateway; empty where it asks for none."""
        keys = spec.settings.api_keys
        return self.keys[keys.file] if keys else ()

    def hub_tokens(self, spec: HostSpec) -> dict[str, str]:
        """Tokens of the model hubs by their place on a host; those that are set."""
        hub = spec.settings.hub
        named = {
            paths.HUB_TOKEN: hub.token_file,
            paths.HUGGINGFACE_TOKEN: hub.huggingface_token_file,
        }
        return {place: self.tokens[path] for place, path in named.items() if path}

    def vrrp_password(self, spec: HostSpec) -> str | None:
        """What tells the gateways' group from others; None where it has no password."""
        shared = spec.settings.gateway.keepalived
        path = shared.password_file if shared else None
        return self.vrrp[path] if path else None

    def certificate(self, spec: HostSpec) -> tuple[str, str] | None:
        """(chain, key) of a gateway as PEM texts; None where it has none from this machine."""
        tls = spec.settings.gateway.tls
        if tls and tls.certificate and tls.key:
            return self.tls[tls.certificate], self.tls[tls.key]
        return None


def alerting_files(settings: Alerting) -> Iterator[tuple[tuple[str, ...], str]]:
    """The files that receivers of alerts name, each with the setting below `alerting`."""
    for name, receiver in settings.receivers.items():
        for key in ("url_file", "secret_file"):
            if path := getattr(receiver, key):
                yield ("receivers", name, key), path
    if settings.mail and settings.mail.password_file:
        yield ("mail", "password_file"), settings.mail.password_file


def lock_path(path: str, version: str) -> str:
    """Where the lock of a version is, `{version}` filled in."""
    return path.replace("{version}", version)


def config_path(name: str, model: Model) -> str:
    """Where a model's config.json is looked for beside group_vars."""
    revision = f"@{weights.path_safe(weights.revision_of(model))}" if model.source != "path" else ""
    return f"configs/{weights.path_safe(name)}{revision}.json"


def read_config(root: Path, path: str) -> dict[str, Any] | None:
    """A config.json beside group_vars; None where there is none. Raises SpecError for others."""
    try:
        found = parsed((root / path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        text = f"is no readable JSON ({error}); fetch it again, or delete it"
        raise SpecError([Complaint(path, 0, 0, "", text)]) from None
    if not isinstance(found, dict):
        text = "must be the config.json of the model's repository; fetch it again, or delete it"
        raise SpecError([Complaint(path, 0, 0, "", text)])
    return found


def version_of(spec: HostSpec, instance: Instance) -> str:
    """The wanted vLLM version of an instance: its own, its model's, or its host's."""
    model = spec.settings.models[instance.model]
    version = instance.vllm_version or model.vllm_version or spec.settings.vllm_version
    assert version, "a spec without it is refused"
    return version


def read_packages_locks(root: Path) -> dict[str, str]:
    """Checksums of the bundle's lists of Debian packages, by system; files without one are none."""
    found = {}
    for path in root.glob("locks/apt-*.txt"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        sums = [line for line in lines if re.fullmatch(r"[0-9a-f]{64}", line)]
        if len(sums) == 1:
            found[path.stem.removeprefix("apt-")] = sums[0]
    return found


def read_inputs(fleet: Fleet) -> Inputs:
    """The files that a checked fleet names, relative to its directory.

    What they must hold was checked with the spec; OSError where one vanished since.
    """
    root = Path(fleet.root)
    inputs = Inputs(placement=read_placement(root, fleet.inventory))
    if any(spec.settings.air_gapped for spec in fleet.hosts):
        inputs.packages_lists.update(read_packages_locks(root))
    for spec in fleet.group("gpu"):
        for instance in spec.instances:
            path = config_path(instance.model, spec.settings.models[instance.model])
            if path not in inputs.configs and (config := read_config(root, path)) is not None:
                inputs.configs[path] = config
            listed = spec.settings.models[instance.model]
            path = listings.path_of(instance.model, listed)
            if listed.source != "path" and path not in inputs.listings:
                listing = listings.read_listing(root, instance.model, listed)
                if listing is not None:
                    inputs.listings[path] = listing
        hub = spec.settings.hub
        for token in (hub.token_file, hub.huggingface_token_file):
            if token:
                inputs.tokens[token] = (root / token).read_text(encoding="utf-8")
        if spec.settings.vllm_lock:
            for instance in spec.instances:
                path = lock_path(spec.settings.vllm_lock, version_of(spec, instance))
                if path not in inputs.locks:
                    inputs.locks[path] = (root / path).read_text(encoding="utf-8")
    for spec in fleet.group("monitoring"):
        grafana = spec.settings.monitoring.grafana
        if grafana and grafana.key_file:
            inputs.apt_keys[grafana.key_file] = _armoured(root, grafana.key_file)
        for _, name in alerting_files(spec.settings.monitoring.alerting):
            inputs.alerting[name] = (root / name).read_text(encoding="utf-8")
    for spec in fleet.group("gateway"):
        if keys := spec.settings.api_keys:
            read = read_keys(root / keys.file, keys.file)
            if read.complaints:  # it was changed since the check
                raise SpecError(read.complaints)
            inputs.keys[keys.file] = read.keys
        if (shared := spec.settings.gateway.keepalived) and shared.password_file:
            password = (root / shared.password_file).read_text(encoding="utf-8")
            inputs.vrrp[shared.password_file] = password
        if tls := spec.settings.gateway.tls:
            for path in filter(None, (tls.certificate, tls.key)):
                inputs.tls[path] = (root / path).read_text(encoding="utf-8")
    return inputs


def _armoured(root: Path, path: str) -> str:
    """Text of a signing key; SpecError where it is the binary form."""
    try:
        return (root / path).read_text(encoding="ascii")
    except UnicodeDecodeError:
        text = "is a binary key; give its text form: gpg --enarmor < KEY > KEY.asc"
        raise SpecError([Complaint(path, 0, 0, "monitoring.grafana.key_file", text)]) from None
