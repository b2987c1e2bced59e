"""`mlxserve run`: one answer, or a conversation."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mlxserve import config
from mlxserve.cli import console, logs
from mlxserve.cli.addresses import client_url
from mlxserve.cli.answer import Answer, show_answer
from mlxserve.cli.answer_view import Style
from mlxserve.cli.attachment import read_attachment
from mlxserve.cli.chat_backend import ChatBackend, LocalBackend, Message, open_backend
from mlxserve.cli.command import Command
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.options import DraftModel, Host, Port, Speculation, Threads, build, parse_duration_option
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.refusals import in_flags
from mlxserve.cli.session import Session
from mlxserve.cli.statistics import statistics_lines
from mlxserve.errors import ConfigError, InvalidParameter, ModelNotFound, RequestError


class RunCommand(Command):
    """`--think` may stand alone or have a value after `=`, never as the next word, which is the prompt."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--think=true" if arg == "--think" else arg for arg in args])


def run(
    # What is hidden does not fit a screen; docs/cli.md lists every flag.
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print statistics after each answer.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    file: Annotated[
        list[str] | None, typer.Option("--file", metavar="PATH", help="Put a text file first; may be repeated.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(metavar="json|FILE", help="Answer in JSON, or by FILE's JSON schema.")
    ] = None,
    think: Annotated[str | None, typer.Option(metavar="[=HOW]", help="true, false, low, medium or high.")] = None,
    hidethinking: Annotated[bool, typer.Option("--hidethinking", help="Show the answer only.")] = False,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", hidden=True)] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", hidden=True)] = None,
    min_p: Annotated[float | None, typer.Option(metavar="X", hidden=True)] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", hidden=True)] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest answer, in tokens.")] = None,
    markdown: Annotated[
        bool | None, typer.Option("--markdown/--no-markdown", help="Render it.  [on a terminal]")
    ] = None,
    nowordwrap: Annotated[bool, typer.Option("--nowordwrap", hidden=True)] = False,
    keepalive: Annotated[
        float | None,
        typer.Option(metavar="D", parser=parse_duration_option, help="Server keeps MODEL: 5m, 0, -1 for ever."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="N", hidden=True)] = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    threads: Threads = None,
    host: Host = None,
    port: Port = None,
    local: Annotated[bool, typer.Option("--local", help="Never use a running server.")] = False,
) -> None:
    """Answer PROMPT, or converse without one. What is piped in goes before PROMPT.
    MODEL is a name of `mlxserve list`, org/name of the hub, a folder or a .gguf
    file. docs/cli.md has every flag.

    Example: git diff | mlxserve run qwen3-4b 'Write a commit message'
    """
    flags = {"max_model_len": max_model_len, "speculation": speculation, "draft_model": draft_model}
    settings = config.resolve({**flags, "threads": threads, "host": host, "port": port})
    engine_config, server_config = build(settings)
    quiet = settings["log_level"].origin == "default"
    logs.configure("warning" if quiet else server_config.log_level)
    console.make_stdout_lenient()
    for warning in config.unknown_variables():
        console.warn(warning)
    try:
        parameters = ChatParameters(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
        )
        if think is not None:
            parameters = parameters.with_think(think)
    except InvalidParameter as error:
        raise in_flags(error) from error
    if format is not None:
        parameters = parameters.with_format(format)
    display = LoadDisplay()
    # Read before stdin: a wrong name should not wait for what is piped in.
    attachments = [read_attachment(name) for name in file or ()]
    style = Style.for_stdout(markdown=markdown, wordwrap=not nowordwrap, hides_thoughts=hidethinking)
    work = _Run(
        model,
        _prompt(prompt, attachments),
        parameters=parameters,
        system=system,
        attachments=attachments,
        style=style,
        verbose=verbose,
        keep_alive=keepalive,
        display=display,
        open_model=functools.partial(
            open_backend,
            engine_config=engine_config,
            host=server_config.host,
            port=server_config.port,
            api_key=server_config.api_key,
            threads=server_config.threads,
            local=local,
            keep_alive=keepalive,
            progress=display.progress,
        ),
    )
    named = not local and "flag" in (settings["host"].origin, settings["port"].origin)
    try:
        asyncio.run(work.run(client_url(server_config.host, server_config.port) if named else None))
    except RequestError as error:
        raise in_flags(error) from error


def _prompt(words: list[str] | None, attachments: list[str]) -> str | None:
    """Files, piped input and the words of the command line as one prompt; None for a conversation."""
    piped = console.read_stdin()
    if not words and piped is None and console.interactive():
        return None
    parts = [*attachments, (piped or "").strip("\n"), " ".join(words or ())]
    prompt = "\n\n".join(part for part in parts if part.strip())
    if not words and not prompt:
        if piped is None:
            raise ConfigError("there is no prompt, and no terminal for a conversation; give the prompt as an argument")
        raise ConfigError("standard input is empty; pipe a prompt in, or give one as an argument")
    return prompt


def _require_thinking(model: str) -> None:
    """Refuse before the weights are loaded what would be refused after that. A model that is not here yet is not known.

    Raises:
        InvalidParameter: the model does not think.
    """
    from mlxserve.cli.models import open_library

    try:
        capabilities = open_library().show(model, allow_paths=True).capabilities
    except ModelNotFound:
        return
    if "thinking" not in capabilities:
        raise InvalidParameter(f"{model} does not support thinking; leave 'think' out", param="think")


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of the command."""

    model: str
    prompt: str | None
    """An empty one only loads the model, None starts a conversation."""
    parameters: ChatParameters
    system: str | None
    attachments: list[str]
    style: Style
    verbose: bool
    keep_alive: float | None
    display: LoadDisplay
    open_model: Callable[[str], Awaitable[ChatBackend]]

    async def run(self, named_server: str | None) -> None:
        """`named_server`: the address of the server the user asked for, who is told if it is not used."""
        backend = await self.open_model(self.model)
        if named_server is not None and isinstance(backend, LocalBackend):
            console.notice(f"No server with {self.model} at {named_server}; running the model in this process.")
        if self.parameters.think and isinstance(backend, LocalBackend):
            await asyncio.to_thread(_require_thinking, self.model)
        session: Session | None = None
        try:
            with self.display.loading(self.model):
                load_seconds = await backend.load(self.keep_alive if self.prompt == "" else None)
            if self.prompt is None:
                session = await self._session(backend, load_seconds)
                await self._converse(session)
            elif self.prompt:
                await self._answer_once(backend, self.prompt, load_seconds)
        except asyncio.CancelledError:
            # asyncio.run turns Ctrl-C into this; 130 is the shell's code for a command that Ctrl-C ended.
            console.leave(130)
        except BrokenPipeError:
            console.abandon_stdout()
        finally:
            await (session.backend if session is not None else backend).close()

    async def _answer_once(self, backend: ChatBackend, prompt: str, load_seconds: float) -> None:
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": prompt})
        answer = Answer()
        await show_answer(backend, messages, self.parameters, self.style, answer)
        if self.verbose and answer.finished is not None:
            console.notice("\n" + "\n".join(statistics_lines(answer.finished, load_seconds)))

    async def _session(self, backend: ChatBackend, load_seconds: float) -> Session:
        return Session(
            self.model,
            backend,
            await backend.facts(),
            parameters=self.parameters,
            system=self.system,
            style=self.style,
            verbose=self.verbose,
            load_seconds=load_seconds,
            attachments=list(self.attachments),
        )

    async def _open_other(self, model: str) -> ChatBackend:
        from mlxserve.store.registry import Registry

        backend = await self.open_model(model)
        if isinstance(backend, LocalBackend):
            # A slip of the pen must not cost the model that is loaded.
            Registry().resolve(model, allow_paths=True)
        return backend

    async def _converse(self, session: Session) -> None:
        # Only a conversation needs prompt-toolkit, which takes long to import.
        from mlxserve.cli.commands import Commands
        from mlxserve.cli.prompt_reader import PromptReader
        from mlxserve.cli.repl import Repl
        from mlxserve.cli.saved_model import save_model

        reader = PromptReader(config.cache_dir() / "history")
        commands = Commands(session, reader, open_model=self._open_other, save=save_model, display=self.display)
        await Repl(session, reader, commands).run()
