"""Bookkeeping of the block KV cache: which block holds which tokens, and who holds it. Nothing here imports mlx."""
