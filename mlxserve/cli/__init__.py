"""The `mlxserve` command: one module for each command or group of commands.

MLX must not be imported before `blas.preload()`, and `--help` must not wait for it: commands import the engine and the
API inside their functions.
"""
