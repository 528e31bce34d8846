"""``fleet init DIR``: an operator's own directory, so that their values stay out of our files."""

from __future__ import annotations

from pathlib import Path

import click

import vllm_fleet

# What the directory gets: path there, and below the package's skeleton/ or the repository.
OWN = {
    "deploy.py": "deploy.py",
    "upgrade.py": "upgrade.py",
    "rollback.py": "rollback.py",
    "maintain.py": "maintain.py",
    "nccl.py": "nccl.py",
    "bench.py": "bench.py",
    "config.py": "config.py",
    ".gitignore": "gitignore",
    "README.md": "README.md",
}
SHARED = (
    "inventory/prod.py",
    "inventory/local.py",
    "group_vars/all.yml",
    "group_vars/gpu.yml",
    "group_vars/gateway.yml",
    "group_vars/monitoring.yml",
    "group_vars/prod.yml",
    "group_vars/local.yml",
)


def source(name: str) -> Path:
    """A file of the skeleton: in the installed package, or in the repository it is made from."""
    package = Path(vllm_fleet.__file__).resolve().parent
    for place in (package / "skeleton" / name, package.parent / name):
        if place.is_file():
            return place
    raise FileNotFoundError(f"the package is incomplete: {name} is missing")


@click.command()
@click.argument("directory", type=click.Path(file_okay=False))
def init(directory: str) -> None:
    """Write an example inventory, its settings and the deploy files into an empty directory."""
    target = Path(directory)
    try:
        if target.exists() and any(target.iterdir()):
            raise click.ClickException(
                f"{target} is not empty, and nothing in it is overwritten; "
                "name a new or empty directory"
            )
        files = {name: source(origin) for name, origin in OWN.items()}
        files |= {name: source(name) for name in SHARED}
        for name, origin in files.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as stream:  # never over an existing file
                stream.write(origin.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror or error}") from error
    for name in files:
        click.echo(f"wrote {target / name}")
    click.echo(
        f"\nNext: put your hosts into {target / 'inventory/prod.py'}, what they serve into "
        f"{target / 'group_vars/prod.yml'},\nthen, in {target}:\n"
        "  fleet check inventory/prod.py\n"
        "  pyinfra inventory/prod.py deploy.py --dry\n"
        "  pyinfra inventory/prod.py deploy.py"
    )
