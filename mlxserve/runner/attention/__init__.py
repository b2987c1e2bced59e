"""Attention over the block pools: one module for decode rows, one for prefill chunks.

Shapes, here and below: Hq query heads, Hkv key/value heads, G = Hq / Hkv query heads that share one, Dk and Dv their
dimensions, a pool (num_blocks, Hkv, block_size, D).
"""
