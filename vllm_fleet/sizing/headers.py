"""What the weights on disk are, from safetensors headers and the index. Reads no tensor data."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_fleet.jsontext import parsed

from .errors import SizingError

#: A header longer than this is no safetensors file (safetensors refuses 100 MB itself).
HEADER_LIMIT = 100 * 1024 * 1024


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a weights directory."""

    bytes: int
    tensors: int
    dtypes: dict[str, int]  # bytes by dtype
    has_draft: bool
    has_head: bool
    warnings: tuple[str, ...] = ()


def read_header(file: Path) -> dict[str, Any]:
    """The JSON header of one safetensors file. Raises SizingError when it is none."""
    with file.open("rb") as stream:
        first = stream.read(8)
        if len(first) < 8:
            raise SizingError(f"{file}: too short for a safetensors file; fetch it again.")
        (length,) = struct.unpack("<Q", first)
        if length > HEADER_LIMIT:
            what = "a Git LFS pointer" if first.startswith(b"version ") else "no safetensors file"
            raise SizingError(f"{file}: {what}; fetch the real file.")
        text = stream.read(length)
    try:
        header = parsed(text)
    except ValueError as error:
        raise SizingError(f"{file}: its header is not JSON: {error}; fetch it again.") from error
    if not isinstance(header, dict):
        raise SizingError(f"{file}: its header is no JSON object; fetch it again.")
    return header


def stored_weights(directory: Path) -> StoredWeights | None:
    """Sums the tensors of a directory; None when it holds no safetensors.

    With an index only the shards it names count, so that a second copy of the weights
    (consolidated.safetensors) is not counted twice.
    """
    warnings = []
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if index.is_file():
        try:
            listing = parsed(index.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SizingError(f"{index}: not readable as JSON: {error}; fetch it again.") from error
        named = listing.get("weight_map") if isinstance(listing, dict) else None
        if not isinstance(named, dict) or not named:
            raise SizingError(f"{index}: weight_map is missing or empty; fetch it again.")
        total = (listing.get("metadata") or {}).get("total_size")
        if total == 0:
            warnings.append(
                f"{index.name} says total_size 0; the headers of the shards are used instead"
            )
        wanted = sorted({str(v) for v in named.values()})
        missing = [name for name in wanted if not (directory / name).is_file()]
        if missing and files:
            raise SizingError(
                f"{directory}: {len(missing)} of {len(wanted)} shards are missing, the first is "
                f"{missing[0]}; finish the download."
            )
        files = [directory / name for name in wanted if (directory / name).is_file()]
    if not files:
        return None
    size = count = 0
    dtypes: dict[str, int] = {}
    draft = head = False
    for file in files:
        for name, entry in read_header(file).items():
            if name == "__metadata__":
                continue
            try:
                begin, end = entry["data_offsets"]
                dtype = str(entry["dtype"])
                length = int(end) - int(begin)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise SizingError(f"{file}: tensor {name}: {error!r} in its header.") from error
            size += length
            count += 1
            dtypes[dtype] = dtypes.get(dtype, 0) + length
            draft = draft or name.startswith("mtp.") or ".eh_proj." in name
            head = head or "lm_head." in name or ".output_layer." in name
    if not size:
        raise SizingError(f"{directory}: its safetensors hold no data; fetch them again.")
    return StoredWeights(size, count, dtypes, draft, head, tuple(warnings))
