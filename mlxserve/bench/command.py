"""`mlxserve bench`: get to know the server, measure it, write the report, whatever happens on the way."""

from dataclasses import dataclass
from pathlib import Path

from mlxserve.bench import cold_start, model_files, plan, process, session, target
from mlxserve.bench.client import Target
from mlxserve.bench.figures import Limits
from mlxserve.bench.model_files import ModelFiles
from mlxserve.bench.plan import Sizes
from mlxserve.bench.results import Results, new_folder
from mlxserve.bench.session import Log, Session
from mlxserve.bench.target import KnownTarget
from mlxserve.bench.workloads import Cell
from mlxserve.errors import BenchError, BenchOptionError

COLD_START = "cold-start"


@dataclass(frozen=True, slots=True)
class Options:
    url: str | None
    local_url: str
    """Where this machine's own server listens: the target where no other is named."""
    api_key: str | None
    model: str | None
    workloads: tuple[str, ...]
    sizes: Sizes
    runs: int
    limits: Limits
    tokenizer: str | None
    seed: int
    threads: int | None
    """Of the servers that cold-start starts."""


async def run(options: Options, folder: Path, log: Log) -> None:
    """Measure, and write the report into `folder`.

    Raises:
        BenchError: something asked for makes no sense, or the server failed; what was measured until then is written.
    """
    if not 1 <= options.runs <= plan.MAX_REQUESTS:
        raise BenchOptionError(f"--runs must be from 1 to {plan.MAX_REQUESTS:,}, not {options.runs}")
    options.sizes.check(None)
    cells = plan.cells(options.workloads, options.sizes)
    cold = [cell for cell in cells if cell.workload == COLD_START]
    warm = [cell for cell in cells if cell.workload != COLD_START]
    if cold and options.url is not None:
        raise BenchOptionError("cold-start starts servers of its own and measures no other; leave --url out")
    if cold and options.model is None:
        raise BenchOptionError("cold-start starts servers of its own: name the model with --model")
    known = await _known(options) if warm else None
    name = known.target.model if known else options.model or ""
    if known is not None:
        options.sizes.check(known.card.get("context_length"))
    files = model_files.read(options.tokenizer) if options.tokenizer else model_files.find(name)
    work = Session(Results(new_folder(folder)), session.make_prompts(files), options.seed, options.limits, log)
    facts = _facts(options, known, files, work, warm, name)
    try:
        if known is not None:
            await work.run(warm, options.runs, known.target, known.target.model)
        for index in range(options.runs):
            for cell in cold:
                work.prompts.seed(f"{options.seed} {index} {cell}")
                work.add(await cold_start.measure(cell, _spec(options), work.prompts, folder, run=index))
        work.failure = None
    except BenchError as error:
        work.failure = str(error)
        raise BenchError(f"{error} The report in {folder} says what was measured before.") from error
    finally:
        workload = session.describe_workload(cells, options.runs, options.seed, options.limits)
        session.write(work, facts, known.notes if known else (), folder, workload)
    log(f"the report is {folder / 'report.md'}, and report.html beside it")


async def _known(options: Options) -> KnownTarget:
    address: Target = target.parse_url(options.url or options.local_url, options.api_key)
    return await target.get_to_know(address, options.model)


def _spec(options: Options) -> process.ServerSpec:
    flags = ("--threads", str(options.threads)) if options.threads else ()
    return process.mlxserve(options.model or "", *flags)


def _facts(
    options: Options, known: KnownTarget | None, files: ModelFiles | None, work: Session, warm: list[Cell], name: str
) -> dict[str, str]:
    settings = [f"{options.runs} runs", "greedy", f"seed {options.seed}"]
    if known is not None and known.target.fields:
        settings.append("end of sequence ignored (`ignore_eos`)")
    if warm:
        settings.append("warm-up: every number of streams, and the longest prompt, once")
    if options.limits:
        settings.append(f"good is a {options.limits}")
    return session.facts(name, known, files, work.prompts, settings)
