"""Compute capabilities that a wheel's kernels were built for, read from its shared objects.

CUDA programs lie in "fat binaries": a header, then one entry for each architecture, either
machine code (cubin) or PTX that the driver compiles at run time. Only the headers are read here;
their layout is that of ``fatbinary_section.h`` and of the entries that ``cuobjdump`` lists.
"""

from __future__ import annotations

import struct
from collections import Counter

MAGIC = b"\x50\xed\x55\xba\x01\x00\x10\x00"  # magic, version 1, header of 16 bytes
PTX, CUBIN = 1, 2

Programs = Counter[tuple[str, int]]  # (kind, architecture) -> how many


def architectures(data: bytes) -> Programs:
    """How many programs of each (kind, architecture) a shared object holds: ("sm", 90) -> n."""
    found: Programs = Counter()
    at = data.find(MAGIC)
    while at != -1:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        entry, end = at + 16, at + 16 + size
        while entry + 64 <= min(end, len(data)):
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            if kind not in (PTX, CUBIN) or not 50 <= arch <= 200:
                break
            found["sm" if kind == CUBIN else "ptx", arch] += 1
            entry += header + payload
        at = data.find(MAGIC, at + 16)
    return found
