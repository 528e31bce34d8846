"""``fleet bundle INVENTORY DIR``: all that hosts without internet install, in one directory."""

from __future__ import annotations

from pathlib import Path

import click

from vllm_fleet.spec.load import check_inventory


@click.command()
@click.argument("inventory", type=click.Path(exists=True, dir_okay=False))
@click.argument("directory", type=click.Path(file_okay=False))
@click.option(
    "--system",
    "systems",
    multiple=True,
    metavar="NAME[=FILE]",
    help="System of hosts, such as ubuntu-24.04-amd64, and apt sources for it. Default: this "
    "machine's own.",
)
@click.option("--python", metavar="3.12", help="Python of the hosts. Default: the lock's.")
@click.option("--find-links", multiple=True, metavar="DIR", help="Further folders of wheels.")
@click.option("--no-index", is_flag=True, help="Take wheels from --find-links alone.")
@click.option("--hub", metavar="URL", help="ModelScope, or a mirror, as seen from here.")
@click.option("--huggingface", metavar="URL", help="Hugging Face, or a mirror, as seen from here.")
@click.option("--no-packages", is_flag=True, help="Leave the Debian packages out.")
@click.option("--no-weights", is_flag=True, help="Leave the weights out.")
def bundle(
    inventory: str,
    directory: str,
    systems: tuple[str, ...],
    python: str | None,
    find_links: tuple[str, ...],
    no_index: bool,
    hub: str | None,
    huggingface: str | None,
    no_packages: bool,
    no_weights: bool,
) -> None:
    """Write wheels, Debian packages and weights of INVENTORY into DIRECTORY, with checksums.

    Run it on a machine with internet, carry DIRECTORY to the host that `air_gapped.host` names,
    then deploy. What DIRECTORY holds already is kept; touches no host. Exit 1 where something
    cannot be had: run again to go on.
    """
    from vllm_fleet import bundle as making
    from vllm_fleet.onhost.tools import Refusal, gib
    from vllm_fleet.spec.complaints import SpecError

    result = check_inventory(inventory, listings=False)
    if result.fleet is None:
        for complaint in result.complaints:
            click.echo(str(complaint), err=True)
        raise SystemExit(1)
    fleet, root = making.with_hubs(result.fleet, hub, huggingface), Path(result.fleet.root)
    named = []
    for text in systems or () if no_packages else systems or (making.own_system(),):
        name, _, file = text.partition("=")
        named.append(making.System(name, Path(file) if file else None))
    pip = [part for folder in find_links for part in ("--find-links", folder)]
    pip += ["--no-index"] if no_index else []

    def say(text: str) -> None:
        click.echo(text, err=True)

    try:
        wanted = making.Wanted(
            locks=making.locks_of(fleet, python, named),
            models=() if no_weights else making.models_of(fleet, say),
            systems=tuple(named),
            pip=tuple(pip),
            archives=making.archives_of(fleet),
            sources=making.sources_of(fleet),
        )
        manifest = making.make(wanted, Path(directory), root, say)
    except (making.BundleError, Refusal, SpecError, OSError) as error:
        click.echo(f"{error}", err=True)
        raise SystemExit(1) from None
    for name, text in making.lists_of(manifest):
        path = root / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            say(f"{name}: written; commit it")
    total = sum(file["size"] for file in manifest["files"].values())
    click.echo(
        f"{directory}: {len(manifest['files'])} files, {gib(total)}: {len(manifest['locks'])} "
        f"locks, {', '.join(manifest['systems']) or 'no Debian packages'}, "
        f"{len(manifest['models'])} models"
    )
    gap = next((h.settings.air_gapped for h in fleet.hosts if h.settings.air_gapped), None)
    target = f"{gap.host}:{gap.bundle}" if gap else "HOST:DIR, set `air_gapped`"
    click.echo(
        f"carry it: rsync -rtP --exclude '/.*' {directory.rstrip('/')}/ {target}, then deploy"
    )
