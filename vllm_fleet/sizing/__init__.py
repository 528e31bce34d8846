"""Memory of a vLLM server before it is started: weights, KV cache, what fits.

>>> from vllm_fleet.sizing import find_gpu, size
>>> size(config, gpu=find_gpu("H100"), tp=2, vllm_version="0.21.0").kv_cache_tokens
"""

from . import options
from .choose import Choice, Choices, Traffic, choose
from .core import Rank, Sizing, Spread, size
from .errors import RefusedError, SizingError
from .gpus import Gpu
from .gpus import find as find_gpu
from .gpus import from_smi as gpu_from_smi
from .reader import load_config

__all__ = [
    "Choice",
    "Choices",
    "Gpu",
    "Rank",
    "RefusedError",
    "Sizing",
    "SizingError",
    "Spread",
    "Traffic",
    "choose",
    "find_gpu",
    "gpu_from_smi",
    "load_config",
    "options",
    "size",
]
