"""Attention over keys that lie one after another: the tokens of a prefill chunk, or a dense cache.

``reference`` is the contract of ``xla.chunk_attention`` in dense float arithmetic; ``xla.attention`` is the same over
blocks of keys that the caller fetches, wherever they are. There is one implementation, so there is no dispatch.
"""
