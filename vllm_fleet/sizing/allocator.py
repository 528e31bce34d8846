"""PyTorch's CUDA caching allocator, as far as it changes how much counts as allocated.

c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes; up to 1 MiB comes from 2 MiB
segments, under 10 MiB from 20 MiB segments, more from a segment of its own rounded to 2 MiB. A
block of the large pool is split only when more than 1 MiB would be left, else the rest counts as
allocated too. That is up to 1 MiB for each weight matrix, 0.5 % of some models.
"""

from __future__ import annotations

import bisect

MIB = 1 << 20


class Allocator:
    """Allocations that are never freed, as weights are."""

    def __init__(self) -> None:
        self._small: list[int] = []
        self._large: list[int] = []
        self.allocated = 0

    def allocate(self, size: float) -> None:
        """Takes ``size`` bytes; ``allocated`` grows by what the allocator counts."""
        wanted = max(512, -(-int(size) // 512) * 512)
        small = wanted <= MIB
        free = self._small if small else self._large
        at = bisect.bisect_left(free, wanted)
        if at < len(free):
            block = free.pop(at)
        elif small:
            block = 2 * MIB
        elif wanted < 10 * MIB:
            block = 20 * MIB
        else:
            block = -(-wanted // (2 * MIB)) * 2 * MIB
        left = block - wanted
        if left >= 512 if small else left > MIB:
            bisect.insort(free, left)
            block = wanted
        self.allocated += block
