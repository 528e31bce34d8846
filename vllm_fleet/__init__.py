"""vLLM on bare-metal GPU hosts: planned, installed, gated and changed without losing a request."""

__version__ = "0.1.0"
