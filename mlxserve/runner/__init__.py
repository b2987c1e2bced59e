"""The only step-time MLX code: computes a ScheduledStep on a loaded model."""
