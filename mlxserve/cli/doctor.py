"""`mlxserve doctor`: what this machine has of what the server needs, and what to do about the rest."""

import dataclasses
import json

import typer

from mlxserve.cli import console
from mlxserve.cli.checks import CHECKS, Check, Status
from mlxserve.cli.options import Json

MARKS = {Status.OK: "ok  ", Status.WARN: "warn", Status.FAIL: "FAIL"}


def doctor(as_json: Json = False) -> None:
    """Check this machine and the settings. Example: mlxserve doctor

    The exit code is 1 if something is broken.
    """
    console.make_stdout_lenient()
    done: list[Check] = []
    for check in CHECKS:
        with console.spinner(""):
            found = check()
        done += found
        if not as_json:
            for each in found:
                print(f"{MARKS[each.status]}  {each.name:<13} {each.detail}", flush=True)
                if each.advice:
                    print(f"{'':<19} -> {each.advice}", flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in done], indent=2))
    raise typer.Exit(1 if any(each.status is Status.FAIL for each in done) else 0)
