"""mlxserve: serve language models on Apple Silicon from one process."""

__version__ = "0.1.0"
