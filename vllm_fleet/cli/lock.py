"""``fleet lock VERSION [INVENTORY]``: every package of a release, with hashes, as of its day."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from vllm_fleet import lock as locking
from vllm_fleet import release, variants
from vllm_fleet.spec.inputs import lock_path
from vllm_fleet.spec.load import check_inventory
from vllm_fleet.spec.model import VARIANT, HostSettings

PYTHON = "3.12"


@dataclass(frozen=True)
class Task:
    """One lock to make and where it goes."""

    path: Path
    wanted: locking.Wanted
    hosts: tuple[str, ...] = ()
    advice: str = ""


@click.command("lock")
@click.argument("version")
@click.argument("inventory", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option(
    "--as-of",
    metavar="DATE",
    help="Day of which the packages are; `now` for what is there now. Default: the day on which "
    "VERSION came out.",
)
@click.option("--variant", help="cu129, cu130, cpu, rocm. Default: vllm_variant.")
@click.option("--package", help="Distribution that holds vLLM. Default: vllm_package.")
@click.option("--python", metavar="3.12", help="Python of the hosts. Default: `python`, or 3.12.")
@click.option("--platform", default="x86_64", show_default=True, help="x86_64 or aarch64.")
@click.option("--output", type=click.Path(dir_okay=False), help="Default: where vllm_lock says.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def lock(
    version: str,
    inventory: str | None,
    as_of: str | None,
    variant: str | None,
    package: str | None,
    python: str | None,
    platform: str,
    output: str | None,
    as_json: bool,
) -> None:
    """Write the lock of a vLLM VERSION, for the settings of the GPU hosts of INVENTORY.

    The packages are those of the day on which VERSION came out: vLLM leaves most of its
    dependencies open, and with later ones old versions break. Run again with a later --as-of
    to take in a security fix: another lock is another release. Touches no host; exit 1 where no
    lock could be made.
    """
    version = version.removeprefix("v")
    if not re.match(r"^\d+\.\d+(\.\d+)?", version):
        raise click.BadParameter(f"{version!r} is no version such as 0.21.0", param_hint="VERSION")
    if variant is not None and not re.fullmatch(VARIANT, variant):
        raise click.BadParameter(
            f"{variant!r} is no variant: cu129, cu130, cpu, rocm", param_hint="--variant"
        )
    if python is not None and not re.fullmatch(r"3\.\d+(\.\d+)?", python):
        raise click.BadParameter(f"{python!r} is no version such as 3.12", param_hint="--python")
    done, problems = [], []
    try:
        uv = locking.find_uv()
        tasks = _tasks(version, inventory, variant, package, python, platform, output)
        for task in tasks:
            try:
                done.append(_write(task, as_of, uv))
            except (locking.LockingError, OSError) as error:
                problems.append(str(error))
    except locking.LockingError as error:
        problems.append(str(error))
    if as_json:
        click.echo(json.dumps({"locks": done, "problems": problems}, indent=1, ensure_ascii=False))
    else:
        for one in done:
            _say(one)
        for problem in problems:
            click.echo(problem, err=True)
    raise SystemExit(1 if problems else 0)


def _write(task: Task, as_of: str | None, uv: str) -> dict[str, object]:
    """Make one lock and put it in place; what is said of it."""
    made = locking.make(task.wanted, as_of, uv)
    old = task.path.read_text(encoding="utf-8") if task.path.is_file() else None
    changed = locking.changes(old, made.text)
    if old != made.text:
        task.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = task.path.with_name(f".{task.path.name}.{os.getpid()}")
        fresh.write_text(made.text, encoding="utf-8")
        fresh.replace(task.path)
    wanted = task.wanted
    return {
        "path": str(task.path),
        "release": release.release_id(wanted.version, wanted.package, made.text),
        "as_of": made.as_of,
        "python": wanted.python,
        "platform": wanted.platform,
        "packages": len(release.parse_lock(made.text)),
        "state": "new" if old is None else "unchanged" if old == made.text else "changed",
        "changes": changed,
        "hosts": list(task.hosts),
        "warnings": [*made.warnings, *([task.advice] if task.advice else [])],
    }


def _say(one: dict[str, object]) -> None:
    words = {"new": "written; commit it", "unchanged": "unchanged", "changed": "changed; commit it"}
    click.echo(
        f"{one['path']}: {words[str(one['state'])]}: {one['packages']} packages as of "
        f"{one['as_of']} for Python {one['python']} on {one['platform']}; release {one['release']}"
    )
    changes = one["changes"]
    assert isinstance(changes, list)
    for line in changes:
        click.echo(f"  {line}")
    warnings = one["warnings"]
    assert isinstance(warnings, list)
    for line in warnings:
        click.echo(f"warning: {line}", err=True)


def _tasks(
    version: str,
    inventory: str | None,
    variant: str | None,
    package: str | None,
    python: str | None,
    platform: str,
    output: str | None,
) -> list[Task]:
    """The locks to make: one for each different lock file of the GPU hosts."""
    found: dict[Path, Task] = {}
    for host, settings, root in _settings(inventory):
        wanted = locking.Wanted(
            version=version,
            package=package or settings.vllm_package,
            variant=variant or settings.vllm_variant,
            python=python or _python(settings),
            platform=platform,
            exclude=settings.vllm_exclude,
            extra=settings.vllm_extra,
            index=settings.package_index,
        )
        pattern, advice = settings.vllm_lock, ""
        if pattern is None:
            kind = variants.local(version, wanted.variant)
            tail = f"+{kind}" if kind and wanted.package == "vllm" else ""
            pattern = f"locks/{wanted.package}-{{version}}{tail}.txt"
            if not output:
                advice = f'no host uses it yet: set vllm_lock: "{pattern}" in group_vars'
        path = Path(output) if output else root / lock_path(pattern, version)
        known = found.get(path)
        if known is not None and known.wanted != wanted:
            raise locking.LockingError(
                f"{path}: {known.hosts[0]} and {host} use this file and differ in what it is made "
                "for (vllm_package, vllm_variant, vllm_exclude, vllm_extra, python or "
                "package_index): give them another vllm_lock each"
            )
        hosts = (*known.hosts, host) if known else (host,) if host else ()
        found[path] = Task(path, wanted, hosts, advice)
    return list(found.values())


def _settings(inventory: str | None) -> Iterator[tuple[str, HostSettings, Path]]:
    """(host, its settings, directory of group_vars) of every GPU host."""
    if inventory is None:
        yield "", HostSettings(), Path(".")
        return
    result = check_inventory(inventory, locks=False)
    if result.fleet is None:
        raise locking.LockingError("\n".join(map(str, result.complaints)))
    gpu = result.fleet.group("gpu")
    if not gpu:
        raise locking.LockingError(f"{inventory}: has no host in group gpu")
    for spec in gpu:
        yield spec.name, spec.settings, Path(os.path.relpath(result.fleet.root))


def _python(settings: HostSettings) -> str:
    """The version in a setting such as python3.12 or /usr/bin/python3.12, or of an archive."""
    if settings.python_archive:
        return settings.python_archive.version
    match = re.search(r"python(3\.\d+)$", settings.python)
    return match[1] if match else PYTHON
