"""Cards by name: memory as vLLM sees it, compute capability, multiprocessors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .errors import SizingError


@dataclass(frozen=True)
class Gpu:
    """One kind of card. ``gib`` is torch's total, not nvidia-smi's."""

    name: str
    gib: float
    capability: tuple[int, int] = (9, 0)
    sms: int = 132
    nvlink: bool = True
    unified: bool = False
    known: bool = True


@cache
def _table() -> tuple[dict[str, Any], ...]:
    text = (files("vllm_fleet") / "data" / "gpus.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["cards"])


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return " ".join(w for w in words if w not in ("nvidia", "geforce", "tesla", "quadro"))


def _gpu(row: dict[str, Any]) -> Gpu:
    return Gpu(
        row["name"],
        row["gib"],
        (row["capability"][0], row["capability"][1]),
        row["sms"],
        row["nvlink"],
        bool(row.get("unified")),
    )


def names() -> list[str]:
    """Known card names."""
    return [row["name"] for row in _table()]


def find(text: str) -> Gpu:
    """A card by name (as nvidia-smi or this table writes it) or by a number of GiB.

    A number is taken as the total that torch sees, for a card like an H100 otherwise (``known``
    is false then). Raises SizingError for names not in the table.
    """
    wanted = _plain(text)
    for row in _table():
        if any(wanted == _plain(alias) for alias in (*row["match"], row["name"])):
            return _gpu(row)
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", text.strip().lower())
    if number:
        gib = float(number[1])
        if not 1 <= gib <= 1024:
            raise SizingError(f"--gpu {text}: {gib:g} GiB is no memory size of a card.")
        return Gpu(f"{gib:g} GiB", gib, known=False)
    best: tuple[int, dict[str, Any]] | None = None
    for row in _table():
        for alias in (*row["match"], row["name"]):
            plain = _plain(alias)
            if re.search(rf"\b{re.escape(plain)}\b", wanted) and (
                best is None or len(plain) > best[0]
            ):
                best = (len(plain), row)
    if best:
        return _gpu(best[1])
    raise SizingError(
        f"--gpu {text}: this card is not in the table. Give its memory in GiB as torch sees it "
        f"(--gpu 47.4), or one of: {', '.join(names())}."
    )


def from_smi(name: str, mib: int) -> Gpu:
    """A card that nvidia-smi showed with ``mib`` MiB: torch's total is the same share of it.

    Raises SizingError for names not in the table and impossible sizes.
    """
    gpu = find(name)
    for row in _table():
        if row["name"] == gpu.name and row["smi_mib"]:
            share = row["gib"] * 1024 / row["smi_mib"]
            return Gpu(gpu.name, mib / 1024 * share, gpu.capability, gpu.sms, gpu.nvlink)
    return Gpu(gpu.name, mib / 1024, gpu.capability, gpu.sms, gpu.nvlink, gpu.unified)
