"""How to start the servers that are compared."""

from pathlib import Path

from mlxserve.bench import process
from mlxserve.bench.client import HOST
from mlxserve.bench.process import ServerSpec


def mlxserve(model: str, threads: int) -> ServerSpec:
    return process.mlxserve(model, "--threads", str(threads))


def mlx_lm(folder: Path, threads: int, prefill_step_size: int) -> ServerSpec:
    launcher = Path(__file__).with_name("mlx_lm_launcher.py")
    command = ["{python}", str(launcher), str(threads), "--model", str(folder), "--host", HOST, "--port", "{port}"]
    command += ["--prefill-step-size", str(prefill_step_size), "--log-level", "WARNING"]
    return ServerSpec(f"mlx_lm.server, step {prefill_step_size}", "mlx_lm.server", tuple(command), "default_model")


def llama(binary: Path, file: Path, threads: int, num_slots: int, context_length: int) -> ServerSpec:
    """`context_length` is that of one slot."""
    command = [str(binary), "--model", str(file), "--host", HOST, "--port", "{port}"]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(num_slots), "--ctx-size", str(num_slots * context_length)]
    return ServerSpec("llama-server", "llama-server", tuple(command), "default", {"ignore_eos": True})
