"""Writes the JSON of every dashboard."""

from __future__ import annotations

from pathlib import Path

from tools.dashboards.boards import BOARDS
from tools.dashboards.render import text

FOLDER = Path(__file__).parents[2] / "vllm_fleet" / "data" / "dashboards"


def main() -> None:
    """Write what differs; remove what is no board any more."""
    names = {f"{board.name}.json" for board in BOARDS}
    for old in FOLDER.glob("*.json"):
        if old.name not in names:
            old.unlink()
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(text(board), encoding="utf-8")


if __name__ == "__main__":
    main()
