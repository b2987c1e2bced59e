"""Settings: where they come from, what goes before what, and how wrong ones are told."""

import dataclasses
from pathlib import Path

import pytest

from mlxserve import config
from mlxserve.config import EngineConfig, ServerConfig, parse_duration, parse_size
from mlxserve.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_flags_before_environment_before_file_before_default(file: Path) -> None:
    file.write_text("port = 3\nmax_num_seqs = 3\nblock_size = 128\n")
    environ = {"MLXSERVE_PORT": "2", "MLXSERVE_MAX_NUM_SEQS": "2"}
    settings = config.resolve({"port": 1, "host": None}, environ=environ, file=file)
    origins = {
        name: (settings[name].value, settings[name].origin) for name in ("port", "max_num_seqs", "block_size", "host")
    }
    assert origins == {
        "port": (1, "flag"),
        "max_num_seqs": (2, "environment"),
        "block_size": (128, "file"),
        "host": ("127.0.0.1", "default"),
    }
    engine_config, server_config = config.build(settings)
    assert (server_config.port, engine_config.max_num_seqs, engine_config.block_size) == (1, 2, 128)


def test_every_field_is_a_setting(file: Path) -> None:
    fields = {field.name for kind in (EngineConfig, ServerConfig) for field in dataclasses.fields(kind)}
    settings = config.resolve({}, environ={}, file=file)
    assert set(settings) == fields
    assert config.build(settings) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("KV_CACHE_BYTES", "20GB", 20 * 10**9),
        ("KV_CACHE_BYTES", "", None),
        ("REQUEST_TIMEOUT", "1.5", 1.5),
        ("ALLOWED_HOSTS", "a.example, b.example,", ("a.example", "b.example")),
        ("API_KEY", "secret", "secret"),
    ],
)
def test_environment_is_read_by_the_type_of_the_field(file: Path, name: str, text: str, value: object) -> None:
    settings = config.resolve({}, environ={f"MLXSERVE_{name}": text}, file=file)
    assert settings[name.lower()].value == value


def test_lists_and_sizes_in_the_file(file: Path) -> None:
    file.write_text('allowed_origins = ["https://a.example"]\nkv_cache_bytes = "1.5M"\nrequest_timeout = 2\n')
    settings = config.resolve({}, environ={}, file=file)
    assert settings["allowed_origins"].value == ("https://a.example",)
    assert settings["kv_cache_bytes"].value == 1_500_000
    assert settings["request_timeout"].value == 2.0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("colour = 'red'", ["unknown setting", "'colour'"]),
        ("port = 'http'", ["port in", "config.toml"]),
        ("port = true", ["port in", "a number is needed"]),
        ("port = ", ["config.toml cannot be read"]),
    ],
)
def test_wrong_file_is_named(file: Path, content: str, words: list[str]) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        config.resolve({}, environ={}, file=file)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_file_that_is_not_text_is_named(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        config.resolve({}, environ={}, file=file)


@pytest.mark.parametrize("bits", [0, 3, 16, -8])
def test_bits_of_the_kv_cache_are_8_or_4(file: Path, bits: int) -> None:
    with pytest.raises(ConfigError, match=f"kv_bits must be 8 or 4, or be left out, not {bits}"):
        config.build(config.resolve({}, environ={"MLXSERVE_KV_BITS": str(bits)}, file=file))
    engine_config, _ = config.build(config.resolve({"kv_bits": 4}, environ={"MLXSERVE_KV_BITS": "8"}, file=file))
    assert engine_config.kv_bits == 4


def test_a_wrong_flag_wins_nothing(file: Path) -> None:
    with pytest.raises(ConfigError, match="port"):
        config.build(config.resolve({"port": -1}, environ={}, file=file))


def test_wrong_environment_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"MLXSERVE_THREADS.*'two'"):
        config.resolve({}, environ={"MLXSERVE_THREADS": "two"}, file=file)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((EngineConfig, "block_size", value) for value in (0, 4, 48, 1024, -64)),
        *((EngineConfig, field, 0) for field in ("max_num_seqs", "max_prefill_tokens", "max_queue")),
        *((EngineConfig, field, 0) for field in ("max_model_len", "kv_cache_bytes", "request_timeout")),
        (ServerConfig, "port", 65536),
        (ServerConfig, "log_level", "loud"),
        (ServerConfig, "threads", 0),
        (ServerConfig, "shutdown_timeout", -1),
        (ServerConfig, "api_key", " "),
        (ServerConfig, "max_body_bytes", 1023),
    ],
)
def test_impossible_values_are_refused_by_name(kind: type, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        kind(**{field: value})


def test_the_key_is_not_in_the_repr() -> None:
    assert "s3cret" not in repr(ServerConfig(api_key="s3cret"))


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("20GB", 20 * 10**9), ("1.5M", 1_500_000), (" 2 kb ", 2000), ("3T", 3 * 10**12)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "GB", "1.5", "0.0001K", "ten", "1GiB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is float's
        parse_size(text)


def test_folders_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXSERVE_CONFIG_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("MLXSERVE_CACHE_DIR", str(tmp_path / "b"))
    assert config.config_file() == tmp_path / "a" / "config.toml"
    assert config.cache_dir() == tmp_path / "b"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1H30M", 5400.0),
        (" 1.5s ", 1.5),
        ("500ms", 0.5),
        ("2d", 172800.0),
        ("300", 300.0),
        (300, 300.0),
        (0, 0.0),
        ("0", 0.0),
        ("-1", -1.0),
        (-1.5, -1.5),
        ("-1m", -60.0),
        ("99.9", 99.9),
        ("36000d", 36000 * 86400.0),
        # More than a hundred years are for ever.
        ("36501d", -1.0),
        (1e18, -1.0),
        (1e308, -1.0),
        (-1e308, -1.0),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5x",
        "m",
        "1h-30m",
        "1h 30",
        "nan",
        "inf",
        float("nan"),
        True,
        None,
        [5],
        "5m!",
        10**400,
        "9" * 400 + "h",
        "1h" * 400,
    ],
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="a duration is needed"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300.0), ("-1", -1.0), ("0", 0.0)])
def test_keep_alive_is_a_duration(file: Path, text: str, seconds: float) -> None:
    settings = config.resolve({}, environ={"MLXSERVE_KEEP_ALIVE": text}, file=file)
    assert settings["keep_alive"].value == seconds
    file.write_text(f'keep_alive = "{text}"\n')
    assert config.build(config.resolve({}, environ={}, file=file))[0].keep_alive == seconds
    file.write_text('keep_alive = "soon"\n')
    with pytest.raises(ConfigError, match=r"keep_alive in .*'soon' is not valid: a duration is needed"):
        config.resolve({}, environ={}, file=file)


@pytest.mark.parametrize("name", ["max_loaded_models", "memory_budget"])
def test_room_for_models_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be positive, not 0"):
        EngineConfig(**{name: 0})
