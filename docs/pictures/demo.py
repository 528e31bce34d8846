"""Draw the demo's output: a run's text in, docs/pictures/demo.svg out.

Where the demo stands, as root:

    { pyinfra -y inventory/demo.py deploy.py | sed -n '/^--> Results/,/Grand total/p'
      python -m tests.testbed.demo; } | python docs/pictures/demo.py --keep

``--keep`` writes what was read into demo.txt, without the demo's key and this machine's folders;
without it the picture is drawn from demo.txt again.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
TEXT, PICTURE = HERE / "demo.txt", HERE / "demo.svg"
COLUMNS = 100
TITLE = "make demo"


def cleaned(text: str) -> str:
    """The text without keys, folders above the repository, and what is no letter at all."""
    text = re.sub(r"demo-[0-9a-f]{32}", "demo-KEY", text)
    text = re.sub(r"/\S*/(\.testbed)", r"\1", text)
    text = "".join(c for c in text if c == "\n" or (c.isprintable() and c != "\ufffd"))
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


def drawn(text: str) -> str:
    """The picture, as SVG that asks nothing of other servers."""
    console = Console(
        width=COLUMNS,
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    for line in text.splitlines():
        shown = Text(line)
        if line and not line.startswith((" ", "-")):
            shown.stylize("bold")
        shown.highlight_regex(r"^--> .*", "blue")
        shown.highlight_regex(r"^  up\b", "green")
        shown.highlight_regex(r"https?://\S+", "cyan")
        console.print(shown, highlight=False)
    svg = console.export_svg(title=TITLE, theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace(
        "Fira Code", "DejaVu Sans Mono"
    )


def main() -> int:
    """Draw; with ``--keep`` from standard input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="read a new text, and keep it")
    if parser.parse_args().keep:
        TEXT.write_text(cleaned(sys.stdin.read()), encoding="utf-8")
    PICTURE.write_text(drawn(TEXT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
