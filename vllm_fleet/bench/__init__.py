"""How much an endpoint bears: the load, what came of it, and what follows for the settings.

The load itself is made by GuideLLM, a program of the vLLM project; everything here says what to
send, reads what it measured, and draws conclusions.
"""
