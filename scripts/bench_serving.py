"""mlxserve under HTTP load beside mlx_lm.server and llama-server: real server processes, same weights, same machine.

Workloads: `concurrency` (1 to 16 closed-loop streams, short and long random prompts), `mixed` (a long prompt arrives
beside 4 running streams), `multi-turn` (second turn of a long chat).

- All servers get the same texts. mlx_lm.server gets the very weights mlxserve computes with, the same BLAS, and the
  better of two prefill steps, found in the first run of each load. llama-server gets the GGUF file as it is.
- Servers are started once and take turns load by load, run by run; one whose turn it is not is stopped by SIGSTOP.
- Answers are greedy and have exactly the wanted number of tokens; that is checked by the servers' own counts.
- Inter-token latency (ITL) is the gap between two chunks that carry text, as a reader sees it: several tokens in one
  chunk are one gap. TPOT is (last chunk - first chunk) / (tokens - 1), whatever the chunks.
- Figures are medians over the runs (least-largest); ratios are taken within each run, then their median.

On 2 quiet cores everything takes about 30 minutes with two servers, 8 more with llama-server; options choose subsets.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serving_bench import llama_package, servers
from serving_bench.export_model import Description
from serving_bench.report import better, tables
from tokenizers import Tokenizer

from mlxserve.bench import machine, workloads
from mlxserve.bench.process import Server, ServerSpec
from mlxserve.bench.prompts import PromptMaker
from mlxserve.bench.results import Results, new_folder
from mlxserve.bench.session import brief
from mlxserve.bench.workloads import Cell
from mlxserve.errors import BenchError

QUICK = {"runs": 1, "long_runs": 1, "streams": [1, 4], "prompt": [128], "long_prompt": 512, "output_tokens": 16}
WORKLOADS = ("concurrency", "mixed", "multi-turn")
MIXED_STREAMS = 4
LONG_LOAD_TOKENS = 10_000
"""Prompt tokens, of all streams together, from which a load has --long-runs runs."""


def main() -> None:
    arguments = parse_arguments()
    # End like Ctrl-C does: with the servers ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        asyncio.run(run(arguments))
    except (BenchError, RuntimeError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 4, 8, 16], help="of `concurrency`")
    parser.add_argument("--prompt", type=positive, nargs="+", default=[128, 1024], help="of `concurrency`, in tokens")
    parser.add_argument(
        "--requests", type=positive, default=1, help="of `concurrency`: one after the other in each stream"
    )
    parser.add_argument("--long-prompt", type=positive, default=2000, help="of `mixed` and `multi-turn`, in tokens")
    parser.add_argument("--output", type=Path, help="folder for the raw figures, the report and the servers' logs")
    parser.add_argument("--output-tokens", type=positive, default=64, help="of every answer")
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument(
        "--long-runs", type=positive, default=3, help=f"runs of loads with more than {LONG_LOAD_TOKENS} prompt tokens"
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="CPU threads of every server")
    parser.add_argument(
        "--mlx-lm-steps", type=positive, nargs="*", default=[128, 2048], help="prefill steps; none: leave out"
    )
    parser.add_argument(
        "--llama-server", type=executable, default=llama_package.find(), help="binary  [found: %(default)s]"
    )
    llama = parser.add_mutually_exclusive_group()
    llama.add_argument("--with-llama", action="store_true", help="compile llama-server if there is none")
    llama.add_argument("--without-llama", action="store_true", help="leave llama-server out")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--quick", action="store_true", help="one run of a small subset, for trying it out")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def executable(text: str) -> Path:
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a program")
    return Path(found)


async def run(arguments: argparse.Namespace) -> None:
    """Everything: export, start, measure, report.

    Raises:
        BenchError: a server did not start or a request failed.
        RuntimeError: the model cannot be exported, or llama-server not be built.
    """
    started = time.monotonic()
    cells = make_cells(arguments)
    if arguments.with_llama and arguments.llama_server is None:
        arguments.llama_server = llama_package.install()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serving-")))
        logs = arguments.output or folder / "logs"
        new_folder(logs)
        description = export_model(arguments, folder / "model")
        running = [
            Server(spec, logs / f"{spec.name.replace(', ', '-').replace(' ', '-')}.log")
            for spec in choose_servers(arguments, description, folder)
        ]
        for server in running:
            stack.callback(server.stop)
        results = Results(arguments.output)
        prompts = PromptMaker(Tokenizer.from_file(str(folder / "model" / "tokenizer.json")))
        header = describe(arguments, description, running)
        print(header, flush=True)
        counted = await measure(arguments, cells, running, prompts, results)
    report = f"{tables(results, cells, counted)}\n- It took {(time.monotonic() - started) / 60:.0f} minutes."
    print(report)
    if arguments.output:
        (arguments.output / "report.md").write_text(f"{header}\n{report}\n", encoding="utf-8")


def make_cells(arguments: argparse.Namespace) -> list[Cell]:
    output = arguments.output_tokens
    cells = [
        Cell("concurrency", num_streams, num_prompt_tokens, output, arguments.requests)
        for num_prompt_tokens in arguments.prompt
        for num_streams in arguments.streams
    ]
    cells += [
        Cell("mixed", MIXED_STREAMS, arguments.long_prompt, output),
        Cell("multi-turn", 1, arguments.long_prompt, output),
    ]
    return [cell for cell in cells if cell.workload in arguments.workloads]


def export_model(arguments: argparse.Namespace, folder: Path) -> Description:
    script = Path(__file__).with_name("serving_bench") / "export_model.py"
    command = [sys.executable, str(script), arguments.model, str(arguments.threads), str(folder)]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
        raise RuntimeError(f"{arguments.model} could not be loaded and written out, see above")
    return Description.read(folder)


def choose_servers(arguments: argparse.Namespace, description: Description, folder: Path) -> list[ServerSpec]:
    cells = make_cells(arguments)
    specs = [servers.mlxserve(description.file, arguments.threads)]
    specs += [servers.mlx_lm(folder / "model", arguments.threads, step) for step in arguments.mlx_lm_steps]
    if arguments.without_llama:
        return specs
    if arguments.llama_server is None:
        print("llama-server is left out: there is none here; --with-llama compiles it", file=sys.stderr)
    elif not description.file.endswith(".gguf"):
        print("llama-server is left out: it needs a .gguf file as model", file=sys.stderr)
    else:
        # One more than there are streams: in `mixed` the long prompt comes beside them.
        num_slots = max(cell.num_streams for cell in cells) + 1
        context_length = max(cell.context_length for cell in cells)
        binary, file = arguments.llama_server, Path(description.file)
        specs.append(servers.llama(binary, file, arguments.threads, num_slots, context_length))
    return specs


async def measure(
    arguments: argparse.Namespace, cells: list[Cell], running: list[Server], prompts: PromptMaker, results: Results
) -> dict[Cell, list[str]]:
    """All runs of all cells. Returns for each cell the servers that count: of the variants of one only the better."""
    for server in running:
        log(f"starting {server.spec.name}")
        server.start()
        await server.wait_until_healthy()
        prompts.seed(f"{arguments.seed} warm-up")
        async with server.awake() as target:
            await workloads.warm_up(cells, target, prompts)
    counted: dict[Cell, list[str]] = {}
    for run_index in range(max(arguments.runs, arguments.long_runs)):
        for cell in cells:
            if run_index >= (arguments.long_runs if cell.total_prompt_tokens > LONG_LOAD_TOKENS else arguments.runs):
                continue
            for server in running:
                if cell in counted and server.spec.name not in counted[cell]:
                    continue
                prompts.seed(f"{arguments.seed} {run_index} {cell}")
                async with server.awake() as target:
                    measurement = await workloads.measure(cell, target, prompts, server=server.spec.name, run=run_index)
                results.add(measurement)
                log(brief(measurement))
            if cell not in counted:
                counted[cell] = better_variants(cell, [server.spec for server in running], results)
    return counted


def better_variants(cell: Cell, specs: list[ServerSpec], results: Results) -> list[str]:
    """Of each product the one server that did best in the first run."""
    variants: dict[str, list[str]] = {}
    for spec in specs:
        variants.setdefault(spec.product, []).append(spec.name)
    return [better(results, cell, names) for names in variants.values()]


def describe(arguments: argparse.Namespace, description: Description, running: list[Server]) -> str:
    """The report's head: what was measured, on what, and how."""
    versions = machine.versions("mlxserve", "mlx", "mlx-lm")
    if any(server.spec.product == "llama-server" for server in running):
        versions += f", llama-server {llama_package.version(arguments.llama_server)}"
    settings = [
        f"{arguments.runs} runs ({arguments.long_runs} of loads with more than {LONG_LOAD_TOKENS:,} prompt tokens)",
        f"{arguments.output_tokens} tokens out, greedy, end of sequence ignored",
        f"{arguments.requests} request(s) a stream, seed {arguments.seed}",
        "servers in turns, the others stopped by SIGSTOP",
    ]
    commands = [f"  - {server.spec.name}: `{' '.join(server.command)}`" for server in running]
    size = f"{description.num_parameters / 1e6:,.0f} M parameters"
    lines = [
        "# Servers under load",
        f"- Model: {description.name} ({description.architecture}, {size}), {description.quantization} in its file; "
        f"mlxserve and mlx-lm compute with {description.computed_in}, llama-server with the file as it is",
        f"- Machine: {machine.describe()}; MLX on {description.device}",
        f"- Versions: {versions}",
        f"- BLAS of mlxserve and mlx-lm: {description.blas}; threads of every server: {arguments.threads}",
        f"- Environment: {machine.library_variables()}",
        f"- Settings: {'; '.join(settings)}",
        "- Commands:",
        *commands,
    ]
    return "\n".join(lines) + "\n"


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
