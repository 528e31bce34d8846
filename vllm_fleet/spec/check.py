"""Checks that need more than one value: over a file, over a host, over the whole fleet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_fleet.spec.complaints import Complaint, Loc
from vllm_fleet.spec.layers import Layer, Loaded, LoadedHost
from vllm_fleet.spec.model import COMMIT, Instance, Model
from vllm_fleet.spec.words import nearest
from vllm_fleet.spec.yamlfile import Node

NODE_EXPORTER_PORT = 9100  # on every host
GRAFANA_PORT = 3000  # on monitoring hosts, where a package source is configured

# Options of `vllm serve` that the launch script sets itself, and what to use instead.
OWN_ARGS = {
    "model": "the weights come from `source`, `repo` and `revision` of the model",
    "served-model-name": "the name is the model's key in `models`, further ones its `aliases`",
    "port": "the port is `port` of the instance",
    "host": "the instance listens where gateways and monitors reach it",
    "uds": "the instance listens on its `port`",
    "middleware": "the gate that keeps cold traffic away is put there",
    "api-key": "keys are checked at the gateway; see `api_keys`",
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
    "HOME": "it is the instance's own directory",
    "PATH": "it is that of the release",
    "PYTHONPATH": "the gate is found there",
    "VIRTUAL_ENV": "it is that of the release",
    "XDG_CACHE_HOME": "caches are kept by release in the instance's own directory",
    "VLLM_CACHE_ROOT": "caches are kept by release in the instance's own directory",
    "TRITON_CACHE_DIR": "caches are kept by release in the instance's own directory",
    "TORCHINDUCTOR_CACHE_DIR": "caches are kept by release in the instance's own directory",
    "FLASHINFER_WORKSPACE_BASE": "caches are kept by release in the instance's own directory",
    "HF_HOME": "weights are downloaded by deploy.py alone",
    "MODELSCOPE_CACHE": "weights are downloaded by deploy.py alone",
}
_SECRET_ENV = re.compile(r"(^|_)(API_?KEY|ACCESS_KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS)$")
_SECRET_VALUE = re.compile(r"^(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|ms-[0-9a-f-]{30,})$")
_REPOSITORY = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
_ARG = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True)
class _At:
    """A place in a document, and what is said there of one or more hosts."""

    layer: Layer
    loc: Loc

    @property
    def place(self) -> str:
        """``group_vars/gpu.yml:3``, to point at from another complaint."""
        node = self.layer.document.root.at(self.loc)
        return f"{self.layer.document.file}:{node.line}"


class _Findings:
    """Complaints, one for each place and text; hosts of the same complaint are listed in it."""

    def __init__(self) -> None:
        self._found: dict[tuple[Complaint, str], list[str]] = {}

    def say(self, at: _At, text: str, host: str | None = None, *, at_key: bool = False) -> None:
        """Add a complaint; ``{hosts}`` in the text becomes the names of all its hosts."""
        if at.layer.flawed(at.loc):
            return  # what stands there was refused already
        complaint = at.layer.document.complaint(at.loc, "", at_key=at_key)
        self.add(complaint, text, host)

    def add(self, complaint: Complaint, text: str, host: str | None = None) -> None:
        """Like :meth:`say`, of a place that is in no layer."""
        hosts = self._found.setdefault((complaint, text), [])
        if host is not None and host not in hosts:
            hosts.append(host)

    def complaints(self) -> tuple[Complaint, ...]:
        """All of them, in order."""
        return tuple(
            sorted(
                Complaint(c.file, c.line, c.column, c.key, t.replace("{hosts}", ", ".join(hosts)))
                for (c, t), hosts in self._found.items()
            )
        )


def check_fleet(loaded: Loaded) -> tuple[tuple[Complaint, ...], tuple[Complaint, ...]]:
    """Complaints and warnings about everything read for one inventory."""
    found, warnings = _Findings(), _Findings()
    for layer in loaded.layers:
        _layer(found, layer)
        if not loaded.inventory.complaints:  # else its hosts are not known
            _placement(found, layer, loaded)
    for host in loaded.hosts:
        _cards_and_ports(found, host)
        _instances(found, host)
        _listening(found, host)
    _names(found, loaded)
    _files(found, loaded)
    if not loaded.inventory.complaints:
        _unserved(found, loaded)
        _fleet_warnings(warnings, loaded)
    return found.complaints(), warnings.complaints()


def placed(host: LoadedHost) -> Iterator[tuple[_At, Instance]]:
    """The instances of a host, each with its place in the file."""
    layer = host.sources.get("instances")
    if layer is None:
        return
    for number, instance in layer.instances:
        if host.host.name in instance.hosts:
            yield _At(layer, ("instances", number)), instance


# --- one file ------------------------------------------------------------------------------


def _layer(found: _Findings, layer: Layer) -> None:
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
                found.say(_At(layer, (*loc, "hosts", index)), f"names {host} twice")
            seen.add(host)


def _model(found: _Findings, layer: Layer, loc: Loc, model: Model) -> None:
    if model.source == "path":
        if not model.repo.startswith("/"):
            text = "must be an absolute path on the hosts, as `source` is path"
            found.say(_At(layer, (*loc, "repo")), text)
    else:
        if model.repo.startswith(("/", ".", "~")):
            text = "is a directory; say so with `source: path`, or name a repository"
            found.say(_At(layer, (*loc, "repo")), text)
        elif not _REPOSITORY.match(model.repo):
            text = 'must be a repository as "OWNER/NAME"'
            found.say(_At(layer, (*loc, "repo")), text)
        if model.trust_remote_code and not COMMIT.match(model.revision):
            text = (
                "runs code of the repository, which a tag or branch does not pin; "
                "write a commit (40 hex digits) as revision"
            )
            found.say(_At(layer, (*loc, "trust_remote_code")), text)


def _options(found: _Findings, layer: Layer, loc: Loc) -> None:
    """Options and environment that are ours, cannot be written so, or hold a secret.

    Looks at what is written, so that a mistake elsewhere in ``vllm_args`` or ``env`` hides none.
    """
    owner = layer.document.root.at(loc)
    for name in _keys(owner, "vllm_args"):
        at = _At(layer, (*loc, "vllm_args", name))
        plain = name.lstrip("-").replace("_", "-").lower()
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
        elif _secret_value(value):
            found.say(at, _SECRET_TEXT)
        elif _holds_nul(value):
            found.say(at, "must not hold a NUL character")
    for name in _keys(owner, "env"):
        at = _At(layer, (*loc, "env", name))
        if name in OWN_ENV:
            found.say(at, f"is set by us; {OWN_ENV[name]}", at_key=True)
        elif name == "VLLM_API_KEY":
            text = "keys are checked at the gateway; name their file in api_keys.file"
            found.say(at, text, at_key=True)
        elif _SECRET_ENV.search(name) or _secret_value(owner.items["env"].items[name].value):
            found.say(at, _SECRET_TEXT, at_key=True)


def _keys(owner: Node, field: str) -> list[str]:
    return list(owner.items[field].keys) if field in owner.items else []


_SECRET_TEXT = (
    "a secret never stands in group_vars; put a hub's token in a file "
    "and name that file in hub.token_file"
)


def _secret_value(value: Any) -> bool:
    return isinstance(value, str) and bool(_SECRET_VALUE.match(value))


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nul, [*value, *value.values()]))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_nul, value))
    return isinstance(value, str) and "\0" in value


def _placement(found: _Findings, layer: Layer, loaded: Loaded) -> None:
    """Every host of an instance is one of the inventory's, in group gpu."""
    hosts = loaded.inventory.hosts
    for number, instance in layer.instances:
        for index, name in enumerate(instance.hosts):
            at = _At(layer, ("instances", number, "hosts", index))
            if name not in hosts:
                near = nearest(name, hosts)
                hint = f'; did you mean "{near}"?' if near else f"; it has {_some(hosts)}"
                found.say(at, f'"{name}" is no host of {loaded.inventory.file}{hint}')
            elif "gpu" not in hosts[name].groups:
                text = f'"{name}" is not in group gpu of {loaded.inventory.file}'
                found.say(at, text)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


# --- one host ------------------------------------------------------------------------------


def _cards_and_ports(found: _Findings, host: LoadedHost) -> None:
    """One instance a card, one listener a port, one instance a name."""
    me = host.host.name
    names: dict[str, _At] = {}
    cards: dict[int, tuple[str, _At]] = {}
    ports = dict(_other_ports(host))
    for at, instance in placed(host):
        first = names.setdefault(instance.name, at)
        if first is not at:
            text = f"stands twice on {{hosts}}: {first.place} has it too"
            found.say(_At(at.layer, (*at.loc, "name")), text, me)
        port_at = _At(at.layer, (*at.loc, "port"))
        if instance.port in ports:
            text = f"port {instance.port} of {{hosts}} is taken by {ports[instance.port]}"
            found.say(port_at, text, me)
        else:
            ports[instance.port] = f"{instance.name} ({port_at.place})"
        if isinstance(instance.cards, str):
            continue  # resolved by the plan, which has the cards
        for index, card in enumerate(instance.cards):
            card_at = _At(at.layer, (*at.loc, "cards", index))
            if card in cards:
                other, other_at = cards[card]
                text = f"card {card} of {{hosts}} is taken by {other} ({other_at.place})"
                found.say(card_at, text, me)
            else:
                cards[card] = instance.name, card_at


def _other_ports(host: LoadedHost) -> Iterator[tuple[int, str]]:
    """The ports of a host that are not an instance's, and whose they are."""
    for port, owner, _ in _listeners(host):
        yield port, owner


def _listeners(host: LoadedHost) -> Iterator[tuple[int, str, Loc | None]]:
    """Port, owner and, where a setting decides it, the setting."""
    groups, settings = host.host.groups, host.settings
    ssh = host.host.data.get("ssh_port", 22)
    if isinstance(ssh, int):
        yield ssh, "sshd", None
    yield NODE_EXPORTER_PORT, "the node exporter", None
    if "gateway" in groups:
        yield settings.gateway.listen, "the gateway", ("gateway", "listen")
    if "monitoring" in groups:
        yield settings.monitoring.listen, "Prometheus", ("monitoring", "listen")
        if settings.monitoring.grafana is not None:
            yield GRAFANA_PORT, "Grafana", None


def _instances(found: _Findings, host: LoadedHost) -> None:
    """What the instances of a host need: a known model, a release, cards that fit the device."""
    me = host.host.name
    device = host.settings.device
    known = host.sources.get("models")
    names = dict(known.models) if known else {}
    broken = known.broken_models if known else frozenset()
    for at, instance in placed(host):
        model = names.get(instance.model)
        if model is None and instance.model not in broken and "models" not in host.unsound:
            near = nearest(instance.model, names)
            hint = f'; did you mean "{near}"?' if near else ""
            if not near:
                hint = f"; known: {_some(names)}" if names else "; `models` is empty"
            text = f'"{instance.model}" is no model of {{hosts}}{hint}'
            found.say(_At(at.layer, (*at.loc, "model")), text, me)
        version = instance.vllm_version or (model.vllm_version if model else None)
        if not version and _absent(host, "vllm_version") and instance.model not in broken:
            text = "no release for {hosts}; set vllm_version in all.yml, here or at the model"
            found.say(_At(at.layer, (*at.loc, "vllm_version")), text, me)
        cards_at = _At(at.layer, (*at.loc, "cards"))
        if "device" in host.unsound:
            continue
        if device == "cpu" and instance.cards:
            text = "{hosts}: computes on the CPU (`device: cpu`); take the cards away"
            found.say(cards_at, text, me)
        elif device != "cpu" and not instance.cards:
            text = f"is missing or empty; {{hosts}}: computes on {device}, so name the cards"
            found.say(cards_at, text, me)


def _listening(found: _Findings, host: LoadedHost) -> None:
    """The gateway, Prometheus and what every host has: one listener a port."""
    seen: dict[int, tuple[str, Loc | None]] = {}
    for port, owner, setting in _listeners(host):
        first, first_setting = seen.setdefault(port, (owner, setting))
        if first == owner:
            continue
        # Said where the operator wrote one of the two; a default cannot be pointed at.
        for loc, other in ((setting, first), (first_setting, owner)):
            layer = host.sources.get(str(loc[0])) if loc else None
            if layer is not None and loc is not None:
                text = f"port {port} of {{hosts}} is taken by {other}"
                found.say(_At(layer, loc), text, host.host.name)
                break


def _absent(host: LoadedHost, key: str) -> bool:
    """Whether a key has no value, and not because a file has a bad one."""
    return getattr(host.settings, key) is None and key not in host.unsound


# --- the whole fleet -----------------------------------------------------------------------


def _effective_models(loaded: Loaded) -> list[Layer]:
    """The layers that some host has its models from."""
    found: list[Layer] = []
    for host in loaded.hosts:
        layer = host.sources.get("models")
        if layer is not None and layer not in found:
            found.append(layer)
    return found


def _names(found: _Findings, loaded: Loaded) -> None:
    """A name that clients use stands for one model."""
    layers = _effective_models(loaded)
    taken: dict[str, tuple[str, str]] = {}  # name: (model, what it is there)
    for layer in layers:
        for name in layer.models:
            taken.setdefault(name, (name, "a model"))
    for layer in layers:
        for name, model in layer.models.items():
            for index, alias in enumerate(model.aliases):
                at = _At(layer, ("models", name, "aliases", index))
                if alias in model.aliases[:index] or alias == name:
                    found.say(at, f'"{alias}" is a name of this model already')
                    continue
                owner, what = taken.setdefault(alias, (name, f'an alias of "{name}"'))
                if owner != name:
                    found.say(at, f'"{alias}" is {what} already')


def _unserved(found: _Findings, loaded: Loaded) -> None:
    """A model that no instance serves would be downloaded nowhere and answered by nobody."""
    served: set[str] = set()
    for host in loaded.hosts:
        layer = host.sources.get("instances")
        if layer is not None:  # broken instances too: they are complaints of their own
            nodes = layer.document.root.at(("instances",)).items.values()
            served |= {str(node.items["model"].value) for node in nodes if "model" in node.items}
            if any("model" not in node.items for node in nodes):
                return
    if any("instances" in host.unsound for host in loaded.hosts):
        return
    for layer in _effective_models(loaded):
        for name in layer.models:
            if name not in served:
                text = "no instance serves this model; add one to `instances`, or take it away"
                found.say(_At(layer, ("models", name)), text, at_key=True)


def _files(found: _Findings, loaded: Loaded) -> None:
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
            named.append((("hub", "token_file"), settings.hub.token_file))
        if "monitoring" in groups and settings.monitoring.grafana is not None:
            key_file = settings.monitoring.grafana.key_file
            named.append((("monitoring", "grafana", "key_file"), key_file))
        for loc, name in named:
            if name is None:
                continue
            path = loaded.root / name
            at = _At(host.sources[loc[0]], loc)
            if problem := _unreadable(path):
                text = f'"{name}" {problem}; it is looked for below {loaded.root}'
                found.say(at, text)
            elif loc == ("api_keys", "file"):
                _key_file(found, path, name)
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


def _locks(found: _Findings, loaded: Loaded, host: LoadedHost) -> None:
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
            at = _At(host.sources["vllm_lock"], ("vllm_lock",))
            text = f'"{name}" {problem}; `fleet lock {version}` makes it'
            found.say(at, text)


def _key_file(found: _Findings, path: Path, name: str) -> None:
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


def _fleet_warnings(found: _Findings, loaded: Loaded) -> None:
    """What is allowed and may still not be meant."""
    inventory = loaded.inventory
    models = _effective_models(loaded)
    if models and any(layer.models for layer in models) and not inventory.groups.get("gateway"):
        text = "no host is in group gateway: clients must ask the instances themselves"
        found.add(Complaint(inventory.file, 1, 1, "", ""), text)
    by_name = {host.host.name: host for host in loaded.hosts}
    used = {id(host.sources.get("instances")) for host in loaded.hosts}
    for layer in loaded.layers:
        for number, instance in layer.instances:
            for index, name in enumerate(instance.hosts):
                host = by_name.get(name)
                source = host.sources.get("instances") if host else None
                if source is None or source is layer:
                    continue
                at = _At(layer, ("instances", number, "hosts", index))
                where = source.document.file
                if id(layer) in used:
                    text = f"{name} takes its instances from {where}, so it does not run this one"
                    found.say(at, text)
