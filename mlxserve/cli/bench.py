"""`mlxserve bench`: loads on a server, comparing two of them, and the studies."""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxserve import config
from mlxserve.cli.command import Command
from mlxserve.errors import BenchOptionError

if TYPE_CHECKING:
    from mlxserve.bench.figures import Limits

bench = typer.Typer(invoke_without_command=True, add_completion=False, rich_markup_mode=None)


@bench.callback()
def _bench(
    context: typer.Context,
    # What is hidden does not fit a screen; docs/cli.md lists every flag.
    url: Annotated[str | None, typer.Option(metavar="U", help="Address.  [the local mlxserve]")] = None,
    model: Annotated[str | None, typer.Option(metavar="M", help="Model.  [the only one]")] = None,
    workload: Annotated[str, typer.Option(metavar="W,...", help="Kind of load, or 'all'.")] = "concurrency",
    prompt: Annotated[str | None, typer.Option(metavar="N,...", help="Tokens of the prompts.")] = None,
    output_tokens: Annotated[str | None, typer.Option(metavar="N,...", help="Of the answers.")] = None,
    streams: Annotated[str | None, typer.Option(metavar="N,...", help="Closed loops at a time.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="R,...", help="Poisson arrivals a second.")] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="Of each stream.")] = None,
    runs: Annotated[int, typer.Option(metavar="N", help="Repetitions of everything.")] = 3,
    goodput: Annotated[str | None, typer.Option(metavar="T", help="Limits: ttft=500,tpot=50 (ms).")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="For report and raw data.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="M", hidden=True)] = None,
    seed: Annotated[int, typer.Option(metavar="N", hidden=True)] = 0,
    threads: Annotated[int | None, typer.Option(metavar="N", hidden=True)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, one run.")] = False,
) -> None:
    """Measure a server. docs/cli.md has the rest. Example: mlxserve bench --quick"""
    if context.invoked_subcommand is not None:
        return
    from mlxserve.bench import command, plan

    _end_like_ctrl_c()
    names = (
        plan.OF_ANY_SERVER if workload == "all" else tuple(part.strip() for part in workload.split(",") if part.strip())
    )
    _, server_config = config.load_config()
    options = command.Options(
        url=url,
        local_url=_local_url(server_config),
        api_key=server_config.api_key,
        model=model,
        workloads=names,
        sizes=plan.Sizes(
            prompts=_integers("--prompt", prompt),
            outputs=_integers("--output-tokens", output_tokens),
            streams=_integers("--streams", streams),
            rates=_numbers("--rate", rate),
            num_requests=requests,
            is_quick=quick,
        ),
        runs=1 if quick else runs,
        limits=_limits(goodput),
        tokenizer=tokenizer,
        seed=seed,
        threads=threads,
    )
    try:
        asyncio.run(command.run(options, output or _new_folder("bench"), _log))
    except BenchOptionError as error:
        raise typer.BadParameter(str(error)) from error


@bench.command(cls=Command)
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of a session (--output).")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Folder of another one.")],
) -> None:
    """Two sessions of one workload side by side: A / B by run.

    Example: mlxserve bench compare ./mlxserve ./other
    """
    from mlxserve.bench import report
    from mlxserve.bench.compare import compare

    print(report.markdown(compare(first, second)), end="")


@bench.command(cls=Command)
def study(
    model: Annotated[str, typer.Option(metavar="M", help="Alias, repository, folder or file.")] = "smollm2-135m",
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for report and raw data.")] = None,
    runs: Annotated[int, typer.Option(metavar="N", help="Repetitions of everything.")] = 3,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads of the servers.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the prompts.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, one run.")] = False,
) -> None:
    """Cold start, lengths, load, budget, block size, cache.

    Example: mlxserve bench study --model qwen3-4b --output ./study
    """
    from mlxserve.bench import study

    _end_like_ctrl_c()
    if runs < 1:
        raise typer.BadParameter(f"--runs must be at least 1, not {runs}")
    options = study.Options(model, 1 if quick else runs, threads, seed, quick)
    asyncio.run(study.run(options, output or _new_folder("study"), _log))


def _local_url(server_config: config.ServerConfig) -> str:
    from mlxserve.cli.addresses import client_url

    return client_url(server_config.host, server_config.port)


def _new_folder(name: str) -> Path:
    return Path(time.strftime(f"mlxserve-{name}-%Y%m%d-%H%M%S"))


def _end_like_ctrl_c() -> None:
    """On SIGTERM end with the servers ended that were started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _integers(name: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{name} takes whole numbers separated by commas, not {text!r}") from error


def _numbers(name: str, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{name} takes numbers separated by commas, not {text!r}") from error


def _limits(text: str | None) -> "Limits":
    """`ttft=500,tpot=50`, milliseconds."""
    from mlxserve.bench.figures import Limits

    values: dict[str, float] = {}
    for part in (text or "").split(","):
        name, _, number = part.strip().partition("=")
        if not part.strip():
            continue
        try:
            values[name] = float(number) / 1000
        except ValueError:
            values[name] = -1.0
        if name not in ("ttft", "tpot") or not 0 < values[name] < float("inf"):
            raise typer.BadParameter(f"--goodput takes limits in milliseconds, as ttft=500,tpot=50, not {text!r}")
    return Limits(**values)
