"""`mlxserve run`: one answer, or a conversation."""

import asyncio
from typing import Annotated

import typer

from mlxserve import config
from mlxserve.cli import console, logs
from mlxserve.cli.addresses import client_url
from mlxserve.cli.answer import Answer, show_answer
from mlxserve.cli.chat_backend import ChatBackend, LocalBackend, Message, open_backend
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.options import DraftModel, Host, Port, Speculation, Threads
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.statistics import statistics_lines
from mlxserve.errors import ConfigError


def run(
    # Hidden from the list, which would not fit a screen: the text above it tells them.
    model: Annotated[str, typer.Argument(metavar="MODEL", hidden=True)],
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", hidden=True)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print statistics after each answer.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", help="Likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="So many likeliest tokens; 0 takes all.")] = None,
    min_p: Annotated[float | None, typer.Option(metavar="X", help="Tokens above this part of the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Same seed and prompt: same answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest answer, in tokens.")] = None,
    format: Annotated[
        str | None, typer.Option(metavar="json|FILE", help="Answer in JSON, or by FILE's JSON schema.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="N", help="Context length, in tokens.")] = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    threads: Threads = None,
    host: Host = None,
    port: Port = None,
    local: Annotated[bool, typer.Option("--local", help="Never use a running server.")] = False,
) -> None:
    """Answer PROMPT, with piped input before it, or start a conversation. An empty PROMPT only loads MODEL: alias,
    hub repository, folder or .gguf file.

    Example: git diff | mlxserve run qwen3-4b 'Write a commit message'
    """
    flags = {"max_model_len": max_model_len, "speculation": speculation, "draft_model": draft_model}
    settings = config.resolve({**flags, "threads": threads, "host": host, "port": port})
    engine_config, server_config = config.build(settings)
    quiet = settings["log_level"].origin == "default"
    logs.configure("warning" if quiet else server_config.log_level)
    console.make_stdout_lenient()
    parameters = ChatParameters(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    if format is not None:
        parameters = parameters.with_format(format)
    work = _run(
        model,
        _prompt(prompt),
        engine_config,
        server_config,
        parameters=parameters,
        system=system,
        verbose=verbose,
        local=local,
        server_named="flag" in (settings["host"].origin, settings["port"].origin),
    )
    asyncio.run(work)


def _prompt(words: list[str] | None) -> str | None:
    """Piped input and the words of the command line as one prompt; None for a conversation."""
    piped = console.read_stdin()
    if not words and piped is None:
        if console.interactive():
            return None
        raise ConfigError("there is no prompt, and no terminal for a conversation; give the prompt as an argument")
    if not words and not (piped or "").strip():
        raise ConfigError("standard input is empty; pipe a prompt in, or give one as an argument")
    parts = [(piped or "").strip("\n"), " ".join(words or ())]
    return "\n\n".join(part for part in parts if part.strip())


async def _run(
    model: str,
    prompt: str | None,
    engine_config: config.EngineConfig,
    server_config: config.ServerConfig,
    *,
    parameters: ChatParameters,
    system: str | None,
    verbose: bool,
    local: bool,
    server_named: bool,
) -> None:
    """Answer `prompt`; an empty one only loads the model, None starts a conversation."""
    display = LoadDisplay()
    backend = await open_backend(
        model,
        engine_config,
        host=server_config.host,
        port=server_config.port,
        api_key=server_config.api_key,
        threads=server_config.threads,
        local=local,
        progress=display.progress,
    )
    if server_named and not local and isinstance(backend, LocalBackend):
        address = client_url(server_config.host, server_config.port)
        console.notice(f"No server with {model} at {address}; running the model in this process.")
    try:
        with display.loading(model):
            load_seconds = await backend.load()
        if prompt is None:
            await _converse(backend, parameters, system, verbose, load_seconds)
        elif prompt:
            await _answer_once(backend, prompt, parameters, system, verbose, load_seconds)
    except asyncio.CancelledError:
        # asyncio.run turns Ctrl-C into this; 130 is the shell's code for a command that Ctrl-C ended.
        console.leave(130)
    except BrokenPipeError:
        console.abandon_stdout()
    finally:
        await backend.close()


async def _answer_once(
    backend: ChatBackend,
    prompt: str,
    parameters: ChatParameters,
    system: str | None,
    verbose: bool,
    load_seconds: float,
) -> None:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    answer = Answer()
    await show_answer(backend, messages, parameters, answer)
    if verbose and answer.finished is not None:
        console.notice("\n" + "\n".join(statistics_lines(answer.finished, load_seconds)))


async def _converse(
    backend: ChatBackend, parameters: ChatParameters, system: str | None, verbose: bool, load_seconds: float
) -> None:
    # Only a conversation needs prompt-toolkit, which takes long to import.
    from mlxserve.cli.prompt_reader import PromptReader
    from mlxserve.cli.repl import Repl

    reader = PromptReader(config.cache_dir() / "history")
    repl = Repl(backend, reader, parameters=parameters, system=system, verbose=verbose, load_seconds=load_seconds)
    await repl.run()
