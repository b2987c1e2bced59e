"""What each step computes. Nothing here imports mlx."""
