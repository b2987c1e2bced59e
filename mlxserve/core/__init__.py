"""Plain data that crosses between scheduler, runner and engine. Nothing here imports mlx."""
