"""Outputs in the shape of nvidia-smi, made for tests."""

from __future__ import annotations

from collections.abc import Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = Across NUMA nodes
  NV#  = Over # NVLinks
"""


def matrix(
    links: Sequence[Sequence[str]],
    numa: Sequence[str] | None = None,
    nics: int = 0,
    ansi: bool = True,
) -> str:
    """``topo -m`` with tabs, as new drivers print it; the diagonal is " X "."""
    count = len(links)
    columns = [f"GPU{i}" for i in range(count)] + [f"NIC{i}" for i in range(nics)]
    head = "\t".join([*columns, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = ["\t" + (f"\x1b[4m{head}\x1b[0m" if ansi else head)]
    for row in range(count):
        cells = [" X " if column == row else links[row][column] for column in range(count)]
        cells += ["NODE"] * nics
        node = numa[row] if numa else "0"
        lines.append("\t".join([f"GPU{row}", *cells, "0-31", node, "", "N/A"]))
    for nic in range(nics):
        lines.append("\t".join([f"NIC{nic}", *["NODE"] * (count + nics)]))
    return "\n".join(lines) + "\n" + LEGEND


def uniform(count: int, link: str) -> list[list[str]]:
    """All pairs by one link."""
    return [[link] * count for _ in range(count)]


def with_lost(count: int, link: str, lost: int, instead: str) -> list[list[str]]:
    """All pairs by one link, one card by another."""
    return [
        [instead if lost in (row, column) else link for column in range(count)]
        for row in range(count)
    ]


def gpus(
    count: int,
    name: str = "NVIDIA A100-SXM4-80GB",
    memory: int = 81920,
    used: dict[int, int] | None = None,
    start: int = 0,
) -> str:
    """``--query-gpu=index,name,uuid,pci.bus_id,memory.total,memory.used --format=csv``."""
    lines = ["index, name, uuid, pci.bus_id, memory.total [MiB], memory.used [MiB]"]
    for i in range(start, start + count):
        lines.append(
            f"{i}, {name}, GPU-0000000{i}, 00000000:{i + 16:02X}:00.0, {memory} MiB, "
            f"{(used or {}).get(i, 4)} MiB"
        )
    return "\n".join(lines) + "\n"
