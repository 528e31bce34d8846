"""An inventory file and its group_vars as one checked fleet; see :mod:`vllm_fleet.spec.layers`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_fleet.spec.check import check_fleet
from vllm_fleet.spec.complaints import Complaint, SpecError, key_of
from vllm_fleet.spec.inventory import InventoryFile, read_inventory
from vllm_fleet.spec.layers import read_layers
from vllm_fleet.spec.model import Fleet, HostSettings, HostSpec
from vllm_fleet.spec.words import CONNECTION, nearest


@dataclass(frozen=True)
class Result:
    """Outcome of :func:`check_inventory`: a fleet where there are no complaints."""

    fleet: Fleet | None
    complaints: tuple[Complaint, ...]
    warnings: tuple[Complaint, ...]


def load_fleet(inventory_file: str) -> Fleet:
    """The checked fleet of an inventory file.

    Raises :class:`SpecError` with every complaint about the inventory, the files of group_vars
    that it uses and the files they name. Reads only files of the operator's machine.
    """
    result = check_inventory(inventory_file)
    if result.fleet is None:
        raise SpecError(result.complaints)
    return result.fleet


def check_inventory(inventory_file: str, *, locks: bool = True, listings: bool = True) -> Result:
    """Like :func:`load_fleet`, with complaints and warnings as values.

    ``locks``, ``listings``: whether the locks of releases, and what hosts without internet need
    frozen, must be there; not for the commands that make them.
    """
    path = Path(os.path.abspath(inventory_file))
    root = path.parent.parent
    inventory = read_inventory(inventory_file, path.relative_to(root).as_posix())
    loaded = read_layers(root, inventory)
    complaints = [c for layer in loaded.layers for c in layer.complaints]
    if not (root / "group_vars").is_dir():
        text = f"is missing; settings stand beside the inventory's directory, in {root}/group_vars"
        complaints.append(Complaint("group_vars", 0, 0, "", text))
    complaints += inventory.complaints + _inventory_data(inventory)
    found, warnings = check_fleet(loaded, locks=locks, listings=listings)
    ordered = tuple(sorted({*complaints, *found}))
    if ordered:
        return Result(None, ordered, warnings)
    fleet = Fleet(
        inventory=str(path),
        root=str(root),
        hosts=tuple(
            HostSpec(
                name=h.host.name,
                groups=tuple(h.host.groups),
                address=h.settings.address or h.host.default_address,
                settings=h.settings,
            )
            for h in loaded.hosts
        ),
    )
    return Result(fleet, (), warnings)


def _inventory_data(inventory: InventoryFile) -> list[Complaint]:
    """Settings where they have no effect, and misspelt ones, among the inventory's data."""
    found = []
    for group, data in inventory.group_data.items():
        for key in data:
            if key in HostSettings.model_fields:
                line, column = inventory.place(key)
                text = f"a setting of a group stands in group_vars/{group}.yml"
                found.append(Complaint(inventory.file, line, column, key_of((group, key)), text))
    for host in inventory.hosts.values():
        for key in host.data:
            if key in HostSettings.model_fields or key.startswith(CONNECTION):
                continue
            if near := nearest(key, HostSettings.model_fields):
                line, column = inventory.place(host.name, key)
                text = f'no such setting; did you mean "{near}"?'
                key_text = key_of((host.name, key))
                found.append(Complaint(inventory.file, line, column, key_text, text))
    return found
