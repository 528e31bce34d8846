"""docs/settings.md and the shared files of group_vars, written from the models.

$ python -m vllm_fleet.spec.settings > docs/settings.md
$ python -m vllm_fleet.spec.settings gpu > group_vars/gpu.yml
"""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vllm_fleet.spec.model import ApiKey, HostSettings
from vllm_fleet.spec.words import Type, describe

# Which shared file explains which setting. Any of them may stand in any file.
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "all": (
        "Every host of every inventory.",
        (
            "models",
            "python",
            "python_archive",
            "package_index",
            "package_cache",
            "proxy",
            "hub",
            "fanout",
            "air_gapped",
            "address",
            "rollout",
        ),
    ),
    "gpu": (
        "Hosts of group gpu.",
        (
            "vllm_version",
            "device",
            "vllm_package",
            "vllm_variant",
            "vllm_lock",
            "vllm_exclude",
            "vllm_extra",
            "keep_releases",
            "keep_revisions",
            "instances",
            "start_seconds",
            "drain_seconds",
            "hold_driver_packages",
            "firewall",
            "firewall_allow",
            "nccl",
            "probe",
            "gpu_metrics",
        ),
    ),
    "gateway": ("Hosts of group gateway.", ("gateway", "api_keys")),
    "monitoring": ("Hosts of group monitoring.", ("monitoring",)),
}
WIDTH = 96


class _Dumper(yaml.SafeDumper):
    """Quotes what has digits, so that nobody learns to write a version without quotes."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = '"' if re.match(r"^[0-9.]+$|.*[\[\]{}:,@#]", value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def example(field: FieldInfo) -> Any:
    """A value that may stand there: the field's first example, else its default."""
    if field.examples:
        return field.examples[0]
    return _plain(field.get_default(call_default_factory=True, validated_data={}))


def default(field: FieldInfo) -> str:
    """The default as YAML, or that there is none."""
    if field.is_required():
        return "none, it must be set"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "each as below" if isinstance(value, BaseModel) else flow(_plain(value))


def type_of(field: FieldInfo) -> str:
    """The type in plain words, null included where it is allowed."""
    wanted = Type.of(field.annotation, field.metadata)
    return _items(wanted) + (" or null" if wanted.nullable else "")


def flow(value: Any) -> str:
    """A value as YAML in one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=10_000, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _items(wanted: Type) -> str:
    """Like :func:`describe`, and what a list or mapping holds."""
    text = describe(wanted)
    for option in wanted.options:
        inner = _inner(option)
        if text not in ("a list", "a mapping") or inner is None or inner.model is not None:
            continue
        joint = " of names to " if get_origin(option.annotation) is dict else ", each "
        text += joint + describe(inner)
    return text


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _nested(field: FieldInfo) -> tuple[type[BaseModel], str] | None:
    """The model that a setting holds, and what stands between: nothing, a name or a list."""
    wanted = Type.of(field.annotation, field.metadata)
    if wanted.model is not None:
        return wanted.model, ""
    for option in wanted.options:
        inner = _inner(option)
        if inner is not None and inner.model is not None:
            return inner.model, ".<name>" if get_origin(option.annotation) is dict else "[]"
    return None


def _inner(option: Type) -> Type | None:
    """What a list holds, or a mapping by name."""
    if get_origin(option.annotation) not in (list, tuple, dict):
        return None
    args = get_args(option.annotation)
    return Type.of(args[-1] if get_origin(option.annotation) is dict else args[0])


def group_vars(file: str) -> str:
    """One shared file of group_vars: every setting of it explained and commented out."""
    title, keys = FILES[file]
    about = (
        f"{title} Nothing is set here, so that no inventory gets what another was given.",
        'Lines with "##" explain; take "# " from the front of the others to set what they show.',
        "A key replaces the same key of a weaker file whole. Strongest first: host data in the "
        "inventory, the files of its groups, <inventory>.yml, all.yml. See docs/settings.md.",
    )
    lines = [f"## {part}" for text in about for part in textwrap.wrap(text, WIDTH - 3)]
    for key in keys:
        lines.append("")
        lines += _block(key, HostSettings.model_fields[key], 0)
    return "\n".join(lines) + "\n"


def _block(key: str, field: FieldInfo, indent: int) -> list[str]:
    pad = " " * indent
    lead = "## " if indent == 0 else f"# {pad}## "
    about = [field.description or "", f"{_capital(type_of(field))}; default: {default(field)}."]
    lines = [lead + part for text in about for part in textwrap.wrap(text, WIDTH - len(lead))]
    nested = _nested(field)
    if nested is None:
        return [*lines, f"# {pad}{key}: {flow(example(field))}"]
    model, between = nested
    lines.append(f"# {pad}{key}:")
    deeper = indent + 2
    if between:
        lines.append(f"# {pad}  " + ("-" if between == "[]" else f"{_NAMES.get(key, 'ops')}:"))
        deeper += 2
    for name, inner in model.model_fields.items():
        lines += _block(name, inner, deeper)
    return lines


_NAMES = {"models": "glm-4.5-air"}  # of the entry that is shown


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `python -m vllm_fleet.spec.settings` from vllm_fleet/spec/model.py. -->",
        "",
        "Settings stand in `group_vars/*.yml` beside the inventory's directory. Key by key a host "
        "has the value of the first of",
        "",
        '1. its data in the inventory: `("gpu-01", {"address": "10.0.0.11"})`,',
        "2. the file of a group it is in, `group_vars/gpu.yml`; of two groups the one that the "
        "inventory declares later,",
        "3. the file of the inventory, `group_vars/prod.yml` for `inventory/prod.py`,",
        "4. `group_vars/all.yml`,",
        "",
        "and takes it whole: lists and mappings are not mixed. Files of other groups and "
        "inventories are not read. How to reach a host (`ssh_user`, `_sudo`, ...) stands in the "
        "inventory. Secrets stand in files of their own, which settings name relative to the "
        "directory that holds `group_vars`.",
        "",
        "`fleet check inventory/prod.py` checks all of it without touching a host.",
    ]
    for file, (title, keys) in FILES.items():
        lines += ["", f"## {title.removesuffix('.')}", "", f"Explained in `group_vars/{file}.yml`."]
        lines += _table([(key, HostSettings.model_fields[key]) for key in keys])
        for key in keys:
            lines += _section(key, HostSettings.model_fields[key])
        if "api_keys" in keys:
            lines += ["", "### Entries of the file of api_keys", "", _first_line(ApiKey)]
            lines += _table([(f"[].{k}", field) for k, field in ApiKey.model_fields.items()])
    return "\n".join(lines) + "\n"


def _section(key: str, field: FieldInfo) -> list[str]:
    nested = _nested(field)
    if nested is None:
        return []
    model, between = nested
    path = key + between
    lines = ["", f"### {path}", "", _first_line(model)]
    lines += _table([(f"{path}.{name}", inner) for name, inner in model.model_fields.items()])
    for name, inner in model.model_fields.items():
        lines += _section(f"{path}.{name}", inner)
    return lines


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _table(rows: list[tuple[str, FieldInfo]]) -> list[str]:
    lines = ["", "| Setting | Type | Default | Example | Meaning |", "|---|---|---|---|---|"]
    for key, field in rows:
        nested = _nested(field)
        shown = f"see `{key}{nested[1]}`" if nested else f"`{flow(example(field))}`"
        given = default(field)
        given = given if field.is_required() or given == "each as below" else f"`{given}`"
        cells = (f"`{key}`", type_of(field), given, shown, field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


if __name__ == "__main__":
    sys.stdout.write(group_vars(sys.argv[1]) if len(sys.argv) > 1 else page())
