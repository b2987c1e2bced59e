"""Settings: frozen, validated, from flags > environment > config file > defaults.

Each setting is a dataclass field; its flag is `--name-with-dashes`, its environment variable `MLXSERVE_NAME`, its key
in the config file `name`. The file is TOML, at `config_file()`.
"""

import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from mlxserve.errors import ConfigError

SPECULATION_KINDS = ("auto", "ngram", "draft", "off")
ENV_PREFIX = "MLXSERVE_"
OTHER_VARIABLES = ("CONFIG_DIR", "CACHE_DIR", "DEBUG", "PYTHON")
"""Variables with this prefix that are no settings."""
DEFAULT_PORT = 11711


def config_dir() -> Path:
    """Folder of the user's config.toml and models.toml (MLXSERVE_CONFIG_DIR overrides)."""
    override = os.environ.get(ENV_PREFIX + "CONFIG_DIR")
    return Path(override) if override else platformdirs.user_config_path("mlxserve")


def cache_dir() -> Path:
    """Folder for what can be made again: the BLAS shim, measurements, KV blocks, REPL history (MLXSERVE_CACHE_DIR
    overrides)."""
    override = os.environ.get(ENV_PREFIX + "CACHE_DIR")
    return Path(override) if override else platformdirs.user_cache_path("mlxserve")


def kv_disk_dir(config: "EngineConfig") -> Path:
    """Folder of the KV blocks on disk."""
    return config.kv_disk_path.expanduser() if config.kv_disk_path is not None else cache_dir() / "kv-blocks"


def config_file() -> Path:
    return config_dir() / "config.toml"


MAX_DURATION = 100 * 365 * 86400.0
"""Seconds. What is longer is for ever: no clock and no calendar has to take it."""
_MAX_DURATION_LENGTH = 100
_DURATION_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_DURATION_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h|d)"
_DURATION = re.compile(rf"([+-]?)((?:{_DURATION_PART})+)")


def parse_duration(text: str | float) -> float:
    """Seconds: a number of them (300, "300"), or as Go writes durations: "5m", "1h30m", "1.5s", "500ms"; also "d" for
    days. What is negative means for ever, wherever a duration may be that; beyond MAX_DURATION it is -1.

    Raises:
        ValueError: not such a duration, or an infinite one.
    """
    seconds = _seconds(text)
    if not math.isfinite(seconds):
        raise ValueError("a duration is needed: seconds, or as 5m, 1h30m, 500ms; negative means for ever")
    return seconds if abs(seconds) <= MAX_DURATION else -1.0


def _seconds(text: str | float) -> float:
    """NaN if it is no duration."""
    if isinstance(text, str):
        text = text.strip().lower()
        if len(text) > _MAX_DURATION_LENGTH:
            return math.nan
        if (match := _DURATION.fullmatch(text)) is not None:
            parts = re.findall(_DURATION_PART, match[2])
            seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
            return -seconds if match[1] == "-" else seconds
    try:
        # A boolean is an int to Python, and none to who writes `keep_alive: true`.
        return math.nan if isinstance(text, bool) else float(text)
    except (TypeError, ValueError, OverflowError):
        return math.nan


class Duration(float):
    """Seconds, of anything parse_duration() takes."""

    def __new__(cls, value: float | str) -> "Duration":
        """Raises ValueError: it is no duration."""
        return super().__new__(cls, parse_duration(value))


DEFAULT_KEEP_ALIVE = Duration(300.0)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine; one object for each loaded model."""

    block_size: int = 64
    """Tokens a KV block holds: a power of two from 8 to 512."""
    max_num_seqs: int = 32
    """Sequences that run at the same time."""
    max_prefill_tokens: int | None = None
    """Prompt tokens a step computes at most; None: as many as suit the device."""
    max_queue: int = 512
    """Requests that wait at most; more are refused."""
    max_model_len: int | None = None
    """Context length; None: the model's own."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache at most; None: what the device's budget leaves beside the weights."""
    request_timeout: float | None = None
    """Seconds a request may take, queueing included; None: no limit."""
    kv_bits: int | None = None
    """Bits of an element of a key or value in the KV cache, 8 or 4; None: the model's own type."""
    enable_prefix_caching: bool = True
    """Reuse cached blocks of earlier requests that begin with the same tokens."""
    kv_disk: int | None = None
    """Bytes of KV blocks kept on disk at most, of all models together; None: none are."""
    kv_disk_path: Path | None = None
    """Folder of these blocks; None: `kv-blocks` in the cache folder."""
    target_itl_ms: float = 100.0
    """Milliseconds between two tokens of a stream that prompts computed beside it should not exceed."""

    speculation: str = "auto"
    """Who guesses at next tokens where a request does not say: auto, ngram, draft, off (core.request.Speculation)."""
    draft_model: str | None = None
    """Name of a smaller model of the same vocabulary that guesses at what every other model here will say."""

    keep_alive: Duration = DEFAULT_KEEP_ALIVE
    """Seconds that a model stays loaded after its last request; negative: until there is need for its memory."""
    pin: tuple[str, ...] = ()
    """Names of models that, once loaded, neither expire nor make room for others."""
    max_loaded_models: int | None = None
    """Models in memory at most; None: as many as fit."""
    memory_budget: int | None = None
    """Bytes of the weights and KV caches of all models; None: the device's budget, less room for a step's arrays."""

    def __post_init__(self) -> None:
        _require(
            8 <= self.block_size <= 512 and self.block_size & (self.block_size - 1) == 0,
            f"block_size must be a power of two from 8 to 512, not {self.block_size}",
        )
        for name in ("max_num_seqs", "max_queue"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "max_prefill_tokens",
            "max_model_len",
            "kv_cache_bytes",
            "kv_disk",
            "request_timeout",
            "max_loaded_models",
            "memory_budget",
        ):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive, not {value}")
        _require(self.kv_bits in (None, 8, 4), f"kv_bits must be 8 or 4, or be left out, not {self.kv_bits}")
        _require(
            self.kv_disk is None or self.enable_prefix_caching,
            "kv_disk keeps blocks of the prefix cache, which is off: leave one of kv_disk and no-prefix-caching out",
        )
        _require(
            math.isfinite(self.target_itl_ms) and self.target_itl_ms > 0,
            f"target_itl_ms must be positive, not {self.target_itl_ms}",
        )
        _require(
            self.speculation in SPECULATION_KINDS,
            f"speculation must be {', '.join(SPECULATION_KINDS[:-1])} or {SPECULATION_KINDS[-1]}, "
            f"not {self.speculation!r}",
        )
        _require(
            self.speculation != "draft" or self.draft_model is not None,
            "speculation is draft and there is no draft_model; name one, or set speculation to auto",
        )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of `mlxserve serve`."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = field(default=None, repr=False)
    """Clients must send it as a bearer token (or x-api-key) when set."""
    allowed_hosts: tuple[str, ...] = ()
    """Host headers accepted beside loopback names and `host` itself."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins accepted beside loopback ones."""
    max_body_bytes: int = 32 * 1024 * 1024
    allow_pull: bool | None = None
    """Let clients download models through /api/pull; None: if the server is bound to a loopback address."""
    model_dirs: tuple[str, ...] = ()
    """Folders whose models clients may give a name through /api/create."""
    log_level: str = "info"
    threads: int | None = None
    """Threads of the CPU's matrix library; None: one for each core. No effect on a GPU."""
    debug_prompts: bool = False
    """Let /debug show what prompts say."""
    otlp_traces_endpoint: str | None = None
    """Where to send each request as OpenTelemetry spans, by OTLP over HTTP: http://127.0.0.1:4318/v1/traces."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after the first Ctrl-C."""

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"port must be from 0 to 65535, not {self.port}")
        _require(self.max_body_bytes >= 1024, "max_body_bytes must be at least 1024")
        _require(
            self.otlp_traces_endpoint is None or self.otlp_traces_endpoint.startswith(("http://", "https://")),
            f"otlp_traces_endpoint must be an http:// or https:// address, not {self.otlp_traces_endpoint!r}",
        )
        _require(
            self.log_level in ("debug", "info", "warning", "error"),
            f"log_level must be debug, info, warning or error, not {self.log_level!r}",
        )
        _require(self.threads is None or self.threads >= 1, f"threads must be at least 1, not {self.threads}")
        for name in ("allowed_hosts", "allowed_origins"):
            _require(
                "*" not in getattr(self, name),
                f"{name} cannot be '*': it would let every web page use the server; name what you trust",
            )
        _require(self.shutdown_timeout >= 0, "shutdown_timeout must not be negative")
        _require(
            self.api_key is None or bool(self.api_key.strip()), "api_key must not be empty; leave it out for no key"
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting: its value and where it came from (flag, environment, file, default)."""

    name: str
    value: Any
    origin: str


def resolve(
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> dict[str, Setting]:
    """Resolve every setting of both configs. A flag that is None was not given.

    Raises:
        ConfigError: an unknown key in the file, or a value that cannot be read.
    """
    environ = os.environ if environ is None else environ
    file = config_file() if file is None else file
    from_file = _read_file(file)
    settings: dict[str, Setting] = {}
    for config in (EngineConfig, ServerConfig):
        hints = typing.get_type_hints(config)
        # All of them, also those that a flag or the environment overrides: a wrong line is an error either way.
        file_values = {
            name: _parse(value, hints[name], f"{name} in {file}") for name, value in from_file.items() if name in hints
        }
        for spec in dataclasses.fields(config):
            name = spec.name
            env_name = ENV_PREFIX + name.upper()
            if flags.get(name) is not None:
                settings[name] = Setting(name, flags[name], "flag")
            elif environ.get(env_name):
                settings[name] = Setting(name, _parse(environ[env_name], hints[name], env_name), "environment")
            elif name in from_file:
                settings[name] = Setting(name, file_values[name], "file")
            else:
                settings[name] = Setting(name, spec.default, "default")
            from_file.pop(name, None)
    if from_file:
        raise ConfigError(f"{file}: unknown setting {next(iter(from_file))!r}")
    return settings


def build(settings: Mapping[str, Setting]) -> tuple[EngineConfig, ServerConfig]:
    """The two config objects of resolved settings.

    Raises:
        ConfigError: a value is out of range.
    """

    def pick(config: type) -> dict[str, Any]:
        return {spec.name: settings[spec.name].value for spec in dataclasses.fields(config)}

    return EngineConfig(**pick(EngineConfig)), ServerConfig(**pick(ServerConfig))


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """One warning for each variable that looks like a setting and is none, so that a slip of the pen is noticed."""
    environ = os.environ if environ is None else environ
    fields = (spec.name.upper() for config in (EngineConfig, ServerConfig) for spec in dataclasses.fields(config))
    known = {*fields, *OTHER_VARIABLES}
    warnings = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and name not in known and not name.startswith("TEST_"):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {ENV_PREFIX}{close[0]}?" if close else "`mlxserve config` lists the settings"
            warnings.append(f"{variable} is set and means nothing to mlxserve; {hint}")
    return warnings


def load_config(**flags: Any) -> tuple[EngineConfig, ServerConfig]:
    """resolve() and build() in one call, with flags by name."""
    return build(resolve(flags))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse(value: Any, hint: Any, where: str) -> Any:
    """Turn a string of the environment or a TOML value into the type of the field."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and value == "":
        return None
    target = next(option for option in options if option is not type(None))
    try:
        if typing.get_origin(target) is tuple:
            items = value.split(",") if isinstance(value, str) else value
            return tuple(str(item).strip() for item in items if str(item).strip())
        if target is bool:
            return parse_bool(value)
        if target in (int, float) and isinstance(value, bool):
            raise ValueError("a number is needed")
        if target is int and isinstance(value, float) and not value.is_integer():
            raise ValueError("a whole number is needed")
        if target is int and isinstance(value, str):
            return parse_size(value)
        return target(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {value!r} is not valid: {error}") from error


def parse_bool(value: Any) -> bool:
    """A boolean, or a word for one: true, yes, on, 1; false, no, off, 0.

    Raises:
        ValueError: no such word.
    """
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    word = str(value).strip().lower()
    if word not in words:
        raise ValueError("true or false is needed")
    return words[word]


def parse_size(text: str) -> int:
    """An integer, with an optional decimal size suffix: '512', '20GB', '1.5M'.

    Raises:
        ValueError: not such a number.
    """
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    stem = text.strip().upper().removesuffix("B")
    unit = stem[-1:] if stem[-1:] in ("K", "M", "G", "T") else ""
    try:
        number = float(stem.removesuffix(unit)) * units[unit]
    except ValueError:
        raise ValueError("it is no number") from None
    if number != int(number):
        raise ValueError("a whole number is needed")
    return int(number)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
