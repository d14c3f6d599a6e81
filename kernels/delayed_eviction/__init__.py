"""Attention under delayed eviction for whole sequences: training (soft gates) and prefill (hard decisions).

``reference`` is the contract in dense float arithmetic, ``xla`` the blockwise implementation for every device,
``mosaic`` the kernel for Hopper GPUs (``schedule`` decides which blocks it computes), ``api`` chooses.
"""
