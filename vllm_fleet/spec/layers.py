"""The files of group_vars that an inventory uses, and what each host has of them.

Key by key a host has the value of the first of: its data in the inventory, the files of its
groups (a later declared group first), the file of the inventory, all.yml. A value is taken whole,
never mixed with another. Files of other groups and inventories are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vllm_fleet.spec.complaints import Complaint, Loc
from vllm_fleet.spec.inventory import InventoryFile, InventoryHost
from vllm_fleet.spec.model import HostSettings, Instance, Model, Settings
from vllm_fleet.spec.words import complaints_of, places_of
from vllm_fleet.spec.yamlfile import Document, Node, read_document


@dataclass
class Layer:
    """One place that settings come from: a file of group_vars, or a host's data.

    ``values`` holds what is sound, by top-level key. ``numbers`` is the index in the file of each
    instance in it; entries that are no mapping are left out, models of that kind are named in
    ``broken_models``. ``flaws`` are the places of the values that are refused.
    """

    document: Document
    values: dict[str, Any] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()
    broken_models: frozenset[str] = frozenset()
    flaws: frozenset[Loc] = frozenset()
    complaints: list[Complaint] = field(default_factory=list)

    def flawed(self, loc: Loc) -> bool:
        """Whether a value, something in it or something it is in was refused."""
        return any(flaw[: len(loc)] == loc[: len(flaw)] for flaw in self.flaws)

    @property
    def models(self) -> Mapping[str, Model]:
        """The sound models of this layer."""
        found: Mapping[str, Model] = self.values.get("models", {})
        return found

    @property
    def instances(self) -> tuple[tuple[int, Instance], ...]:
        """The sound instances of this layer, each with its index in the file."""
        return tuple(zip(self.numbers, self.values.get("instances", ()), strict=True))


@dataclass
class LoadedHost:
    """A host of the inventory and the layer that each of its settings comes from."""

    host: InventoryHost
    sources: dict[str, Layer]
    settings: HostSettings
    chain: list[Layer]  # every layer of this host, weakest first

    @property
    def unsound(self) -> set[str]:
        """Top-level keys that some layer has, but not one that could be used."""
        written = {str(key) for layer in self.chain for key in layer.document.root.items}
        return written - set(self.sources)


@dataclass
class Loaded:
    """Everything read for one inventory, before the checks over all hosts."""

    root: Path
    inventory: InventoryFile
    layers: list[Layer]
    hosts: list[LoadedHost]


def read_layers(root: Path, inventory: InventoryFile) -> Loaded:
    """Every layer in use, and for every host what it has."""
    files: dict[str, Layer | None] = {}

    def of_group(group: str) -> Layer | None:
        if group not in files:
            files[group] = _read_group(root, group)
        return files[group]

    used = [name for name, hosts in inventory.groups.items() if hosts]
    for group in ("all", inventory.stem, *used):
        of_group(group)
    own: list[Layer] = []
    hosts: list[LoadedHost] = []
    merged: dict[tuple[int, ...], tuple[dict[str, Layer], HostSettings]] = {}
    for host in inventory.hosts.values():
        groups = [group for group in host.groups if group != inventory.stem]
        chain = [of_group("all"), of_group(inventory.stem), *map(of_group, groups)]
        if data := {k: v for k, v in host.data.items() if k in HostSettings.model_fields}:
            own.append(_host_layer(inventory, host.name, data))
            chain.append(own[-1])
        present = [layer for layer in chain if layer is not None]
        identity = tuple(map(id, present))  # hosts of the same groups share one result
        if identity not in merged:
            merged[identity] = merge(present)
        hosts.append(LoadedHost(host, *merged[identity], present))
    layers = [layer for layer in files.values() if layer] + own
    return Loaded(root, inventory, layers, hosts)


def merge(layers: list[Layer]) -> tuple[dict[str, Layer], HostSettings]:
    """Layers, weakest first, as the strongest source of each key and the settings it makes."""
    sources: dict[str, Layer] = {}
    for layer in layers:
        for key in layer.document.root.items:
            sources.pop(str(key), None)  # a bad value must not let a weaker one through
        sources.update(dict.fromkeys(layer.values, layer))
    values = {key: layer.values[key] for key, layer in sources.items()}
    return sources, HostSettings.model_validate(values)


def _read_group(root: Path, group: str) -> Layer | None:
    """The layer of one file of group_vars; None where there is no such file."""
    folder = root / "group_vars"
    path = folder / f"{group}.yml"
    for other in (f"{group}.yaml", f"{group}.json"):
        if (folder / other).exists():
            wrong = Document(f"group_vars/{other}", Node({}, "mapping", 1, 1), (), {})
            text = f"is never read; rename it to {group}.yml"
            if not path.exists():
                complaint = Complaint(wrong.file, 0, 0, "", text)
                return Layer(wrong, complaints=[complaint])
    if not path.exists():
        return None
    return make_layer(read_document(path, f"group_vars/{group}.yml"))


def _host_layer(inventory: InventoryFile, name: str, data: dict[str, Any]) -> Layer:
    """The settings among a host's data in the inventory, as if a file had held them."""

    def node(value: Any, place: tuple[int, int]) -> Node:
        if isinstance(value, dict):
            found = Node({}, "mapping", *place)
            found.items = {str(k): node(v, place) for k, v in value.items()}
            found.keys = {str(k): place for k in value}
            found.value = {k: item.value for k, item in found.items.items()}
            return found
        if isinstance(value, (list, tuple)):
            found = Node([], "list", *place)
            found.items = {i: node(v, place) for i, v in enumerate(value)}
            found.value = [item.value for item in found.items.values()]
            return found
        for kind, types in _PYTHON_KINDS:
            if isinstance(value, types):
                return Node(value, kind, *place, written=str(value), quoted=True)
        return Node(str(value), "date", *place, written=str(value), quoted=True)

    root = Node({}, "mapping", *inventory.place(name))
    for key, value in data.items():
        place = inventory.place(name, key)
        root.items[key], root.keys[key] = node(value, place), place
    root.value = {key: item.value for key, item in root.items.items()}
    return make_layer(Document(inventory.file, root, (), {}, prefix=f"{name}."))


_PYTHON_KINDS: tuple[tuple[Any, tuple[type, ...]], ...] = (
    ("null", (type(None),)),
    ("boolean", (bool,)),
    ("integer", (int,)),
    ("number", (float,)),
    ("text", (str,)),
)


def make_layer(document: Document) -> Layer:
    """Check every value of a document against its setting."""
    errors = places_of(document, _errors(document.root.value))
    known = {(c.line, c.column) for c in document.complaints}
    found = [c for c in complaints_of(document, errors) if (c.line, c.column) not in known]
    known |= {(c.line, c.column) for c in found}
    traps = [
        trap
        for loc, text in document.traps.items()
        if _is_trap(document, loc)
        and ((trap := document.complaint(loc, text)).line, trap.column) not in known
    ]
    layer = Layer(document, flaws=frozenset(errors))
    layer.complaints = [*document.complaints, *found, *traps]
    _take_sound(layer)
    return layer


def _errors(data: dict[str, Any]) -> list[ErrorDetails]:
    try:
        HostSettings.model_validate_json(json.dumps(data))
    except ValidationError as error:
        return error.errors(include_url=False, include_input=False)
    return []


def _is_trap(document: Document, loc: Loc) -> bool:
    """``yes`` is a trap only where it might be meant as text: among the options of vLLM."""
    node = document.root.at(loc)
    return node.kind != "boolean" or "vllm_args" in loc


# Stand for a required value that is missing or wrong; nothing is said of them.
_STAND_INS: dict[str, Any] = {
    "repo": "-/-",
    "name": "x",
    "hosts": ["-"],
    "model": "-",
    "port": 1024,
}


def _take_sound(layer: Layer) -> None:
    """Fill ``values`` with what is sound, so that one mistake hides no other.

    A bad top-level value is left out. Of a model or an instance only the bad fields are: they
    are as if not written, and no check speaks of them (:meth:`Layer.flawed`).
    """
    data = layer.document.root.value
    whole = {loc[0] for loc in layer.flaws if len(loc) == 1 or loc[0] not in _ENTRIES}
    clean = {key: value for key, value in data.items() if key not in whole}
    if "models" in clean:
        models = {k: v for k, v in clean["models"].items() if isinstance(v, dict)}
        clean["models"] = {k: _mended(layer, Model, ("models", k), v) for k, v in models.items()}
        layer.broken_models = frozenset(data["models"]) - frozenset(models)
    if "instances" in clean:
        listed = [(i, v) for i, v in enumerate(clean["instances"]) if isinstance(v, dict)]
        layer.numbers = tuple(i for i, _ in listed)
        clean["instances"] = [_mended(layer, Instance, ("instances", i), v) for i, v in listed]
    models_by_name = clean.pop("models", None)
    checked = HostSettings.model_validate_json(json.dumps(clean))
    layer.values = {key: getattr(checked, key) for key in clean}
    if models_by_name is not None:  # a name may be flawed as well, which pydantic would refuse
        layer.values["models"] = {
            name: Model.model_validate_json(json.dumps(model))
            for name, model in models_by_name.items()
        }
    if "instances" in layer.values:
        layer.values["instances"] = tuple(
            instance.model_copy(update=_unlike_any(layer, number))
            for number, instance in zip(layer.numbers, layer.values["instances"], strict=True)
        )


def _unlike_any(layer: Layer, number: int) -> dict[str, Any]:
    """A name and a port that clash with no other, for those of an instance that are flawed."""
    own = {"name": f"-{number}", "port": -1 - number}
    return {k: v for k, v in own.items() if layer.flawed(("instances", number, k))}


_ENTRIES = ("models", "instances")


def _mended(layer: Layer, kind: type[Settings], loc: Loc, entry: dict[str, Any]) -> dict[str, Any]:
    """A model or instance without its flawed fields, with stand-ins for required ones."""
    sound = {
        key: value
        for key, value in entry.items()
        if key in kind.model_fields and not layer.flawed((*loc, key))
    }
    required = (key for key, field in kind.model_fields.items() if field.is_required())
    return {**{key: _STAND_INS[key] for key in required}, **sound}
