"""Names with an adapter behind them, adapters in models.toml, and their files: looked at, listed, copied, removed."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_repos import model_files, safetensors

from mlxserve.cli.serve import _served_name
from mlxserve.engine.library import Library
from mlxserve.errors import ConfigError, ModelInUse, ModelLoadError, ModelNotFound
from mlxserve.store import download_plan, hub, repo_files
from mlxserve.store.adapter import read_adapter
from mlxserve.store.model_source import HubRepo, LocalPath
from mlxserve.store.registry import Registry

CONFIG: dict[str, Any] = {
    "fine_tune_type": "lora",
    "num_layers": 2,
    "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0},
}
ARRAYS = safetensors({"model.layers.0.self_attn.q_proj.lora_a": ("F32", [64, 8], 64 * 8 * 4)})
COMMIT = "a" * 40


def write(folder: Path, config: Any = CONFIG, arrays: bytes = ARRAYS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapters.safetensors").write_bytes(arrays)
    return folder


def cache(repo: str, files: dict[str, bytes]) -> Path:
    """The snapshot of a repository in the hub's cache."""
    folder = download_plan.repo_folder(repo)
    snapshot = folder / "snapshots" / COMMIT
    for each in (snapshot, folder / "blobs", folder / "refs"):
        each.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for number, (name, data) in enumerate(files.items()):
        if "/" not in name:
            (folder / "blobs" / f"{number:040x}").write_bytes(data)
            (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a base, an adapter for it, and a models.toml that names them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    write(tmp_path / "adapter")
    (tmp_path / "base").mkdir()
    for name, data in model_files().items():
        if "/" not in name:
            (tmp_path / "base" / name).write_bytes(data)
    (tmp_path / "models.toml").write_text(
        f"[base]\nsource = {{ path = '{tmp_path}/base' }}\nsampling = {{ top_k = 3 }}\n"
        f"[french]\nadapter = {{ path = '{tmp_path}/adapter' }}\ndescription = 'Speaks French'\n"
        f"[both]\nsource = {{ path = '{tmp_path}/base' }}\nadapter = {{ path = '{tmp_path}/adapter' }}\n"
        "[remote]\nadapter = { repo = 'org/lora', revision = 'v1' }\n"
    )
    return tmp_path


@pytest.fixture
def library(folder: Path) -> Library:
    return Library(Registry(user_file=folder / "models.toml"))


@pytest.mark.parametrize("name", ["base+french", "Base+FRENCH", "base:latest+french:latest"])
def test_base_and_adapter(library: Library, folder: Path, name: str) -> None:
    source = library.registry.resolve(name, allow_paths=False)
    assert (source.name, source.location) == ("base+french", LocalPath(folder / "base"))
    assert (source.adapter, source.sampling) == (LocalPath(folder / "adapter"), {"top_k": 3})
    assert source.weights == library.registry.resolve("both", allow_paths=False).weights


def test_any_model_may_stand_before_the_plus(library: Library) -> None:
    source = library.registry.resolve("org/name@v2+remote", allow_paths=False)
    assert source.name == "org/name@v2+remote"
    assert (source.location, source.adapter) == (HubRepo("org/name", "v2"), HubRepo("org/lora", "v1", is_adapter=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base+nothing", "no adapter is called 'nothing'; .*known are french, remote"),
        ("base+", "no adapter is called ''"),
        ("+french", "no model before its"),
        ("+", "no model before its"),
        ("base+both", "no adapter is called 'both'"),
        ("both+french", "both has an adapter already"),
        ("base+french+french", "one adapter at a time"),
        ("base++french", "one adapter at a time"),
        ("+" * 150, "one adapter at a time"),
        ("french", r"french is an adapter and no model; .* MODEL\+french"),
        ("nothing+french", "no model is called 'nothing'"),
        ("base+../adapter", "no adapter is called"),
        ("../base+french", "no model is called"),
        ("base+french\n", "control characters"),
        ("base+" + "a" * 300, "at most 200"),
    ],
)
def test_names_that_are_none(library: Library, name: str, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words):
        library.registry.resolve(name, allow_paths=False)


def test_folders_are_for_the_command_line(library: Library, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "base")
    resolve = library.registry.resolve
    for name in ("base+../adapter", f"base+{folder}/adapter"):
        assert resolve(name, allow_paths=True).name == f"base+{folder}/adapter"
        with pytest.raises(ModelNotFound, match="no adapter is called"):
            resolve(name, allow_paths=False)
    with pytest.raises(ModelNotFound, match="or a folder that exists"):
        resolve("base+./nowhere", allow_paths=True)
    with pytest.raises(ModelNotFound, match="no model before its"):
        resolve("+french", allow_paths=True)
    # A folder with a plus in its name is itself.
    (folder / "one+french").mkdir()
    assert resolve(f"{folder}/one+french", allow_paths=True).adapter is None
    source = resolve(f"{folder}/one+french+french", allow_paths=True)
    assert (source.location, source.adapter) == (LocalPath(folder / "one+french"), LocalPath(folder / "adapter"))


def test_a_server_gives_folders_names_that_clients_can_use(library: Library, folder: Path) -> None:
    registry = library.registry
    assert _served_name(registry, "base+french") == "base+french"
    assert _served_name(registry, f"{folder}/base") == "base"
    for name, served in (("both", "both"), (f"base+{folder}/adapter", "base+adapter")):
        assert _served_name(registry, name) == served
        found = registry.resolve(served, allow_paths=False)
        assert found.weights == registry.resolve(name, allow_paths=True).weights


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("adapter = 1", "adapter: must be a table"),
        ("adapter = {}", "adapter: needs path, or repo"),
        ("adapter = { package = 'a', file = 'b' }", "adapter: needs path, or repo"),
        ("adapter = { repo = 'a/b', gguf = 'Q8_0' }", "adapter: needs path, or repo"),
        ("adapter = { repo = '../b' }", "adapter.repo: '../b' is not"),
        ("adapter = { repo = 'a/b', revision = '../c' }", "adapter.revision: '../c' is not"),
        ("adapter = { path = '' }", "adapter.path: must be text"),
        ("adapter = { path = 'a' }\nsystem = 'x'", "system: an adapter without a source has only adapter, description"),
        ("adapter = { path = 'a' }\ndescription = 1", "description: must be one line"),
        ("source = { path = 'a' }\nadapter = { file = 'a' }", "adapter: needs path, or repo"),
    ],
)
def test_mistakes_in_models_toml(tmp_path: Path, entry: str, words: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text("# mine\n[mine]\n" + entry)
    with pytest.raises(ConfigError, match=rf"models.toml, line [34]: \[mine\] {words}"):
        Registry(user_file=file).resolve("any", allow_paths=False)


def changed(**fields: Any) -> dict[str, Any]:
    """The config with other fields; those of lora_parameters by their own name."""
    parameters = {**CONFIG["lora_parameters"], **{key: fields[key] for key in fields if key not in CONFIG}}
    return {**CONFIG, "lora_parameters": parameters, **{key: fields[key] for key in fields if key in CONFIG}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "not a JSON object"),
        ({"peft_type": "LORA", "r": 8}, "PEFT"),
        (changed(fine_tune_type="full"), "mlx_lm.fuse"),
        (changed(fine_tune_type="ia3"), "one of lora, dora, not 'ia3'"),
        (changed(fine_tune_type=[1]), "one of lora, dora"),
        (changed(num_layers="2"), "num_layers must be a whole number"),
        (changed(num_layers=True), "num_layers must be a whole number"),
        (changed(lora_parameters=None), "lora_parameters must be an object"),
        (changed(rank=0), "rank must be a positive"),
        (changed(scale=None), "scale must be a number"),
        (changed(scale=float("nan")), "scale must be a number"),
        (changed(dropout=True), "dropout must be a number"),
        (changed(dropout=1.0), "dropout must be from 0"),
        (changed(keys="q_proj"), "keys must be a list"),
        (changed(keys=[1]), "keys must be a list"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(ModelLoadError, match=f"cannot be used: adapter_config.json: .*{words}") as caught:
        read_adapter(write(tmp_path, config), "base+x")
    assert caught.value.model == "base+x"


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, "x")
    write(tmp_path, arrays=ARRAYS[:-1])
    with pytest.raises(ModelLoadError, match="cut short"):
        read_adapter(tmp_path, "x")
    write(tmp_path, arrays=b"\x80\x04pickle")
    with pytest.raises(ModelLoadError, match="not a safetensors file"):
        read_adapter(tmp_path, "x")
    write(tmp_path, arrays=safetensors({}))
    with pytest.raises(ModelLoadError, match="no weights in"):
        read_adapter(tmp_path, "x")
    (tmp_path / "adapters.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no adapters\.safetensors"):
        read_adapter(tmp_path, "x")
    (tmp_path / "adapters.npz").touch()
    with pytest.raises(ModelLoadError, match="npz"):
        read_adapter(tmp_path, "x")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_adapter(tmp_path, "x")


def test_shown_and_listed(library: Library, folder: Path) -> None:
    base, both = library.show("base"), library.show("base+french")
    assert both.adapter is not None
    assert both.num_parameters == base.num_parameters + 64 * 8
    assert both.size == base.size + both.adapter.size
    assert base.adapter is None
    # Other weights than the base, and without its sampling other answers than base+french.
    assert len({base.digest, both.digest, library.show("both").digest}) == 3
    assert {"base", "both"} <= {model.name for model in library.models()}
    assert not {"french", "remote", "base+french"} & {model.name for model in library.models()}
    (folder / "adapter" / "adapters.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no adapters\.safetensors"):
        library.show("both")
    assert "both" not in {model.name for model in library.models()}
    with pytest.raises(ModelNotFound, match=r"org/lora@v1 is not on this machine; .*mlxserve pull base\+remote"):
        library.show("base+remote")


def test_a_copy_keeps_its_adapter(library: Library) -> None:
    library.copy("base+french", "mine")
    library.create("other", "both", system="Be French.")
    for name in ("mine", "other"):
        assert library.show(name).source.weights == library.show("both").source.weights
    assert library.show("mine").source.sampling == {"top_k": 3}


def test_removing_an_adapter(library: Library, folder: Path) -> None:
    adapter = {"adapter_config.json": json.dumps(CONFIG).encode(), "adapters.safetensors": ARRAYS}
    for repo, files in (("org/lora", adapter), ("org/base", model_files())):
        cache(repo, files)
    with (folder / "models.toml").open("a") as stream:
        stream.write("[lora]\nadapter = { repo = 'org/lora' }\n[same]\nadapter = { repo = 'org/lora' }\n")
    assert library.show("org/base+lora").adapter is not None
    with pytest.raises(ModelInUse, match="for the adapter: mlxserve rm lora"):
        library.remove("org/base+lora")
    with pytest.raises(ModelInUse, match="mlxserve rm lora same"):
        library.remove("org/lora")
    assert library.remove("lora") == 0
    assert library.show("org/base+same").adapter is not None
    assert library.remove("same") >= len(ARRAYS)
    assert hub.find_local(library.registry.resolve("org/base", allow_paths=False)) is not None
    assert library.remove("french") == 0
    assert (folder / "adapter" / "adapters.safetensors").exists()
    with pytest.raises(ModelNotFound, match="'french'"):
        library.remove("french")


def test_a_link_out_of_the_store_is_refused(library: Library, folder: Path) -> None:
    with (folder / "models.toml").open("a") as stream:
        stream.write("[lora]\nadapter = { repo = 'org/lora' }\n")
    snapshot = cache("org/lora", {"adapter_config.json": json.dumps(CONFIG).encode()})
    with pytest.raises(ModelNotFound, match="not on this machine"):
        library.show("base+lora")
    (snapshot / "adapters.safetensors").symlink_to(folder / "adapter" / "adapters.safetensors")
    with pytest.raises(ModelLoadError, match="outside of the hub's cache"):
        library.show("base+lora")


def test_repositories_that_hold_no_adapter() -> None:
    assert repo_files.adapter_refusal(["adapter_config.json", "adapters.safetensors"]) is None
    assert "PEFT" in str(repo_files.adapter_refusal(["adapter_config.json", "adapter_model.safetensors"]))
    assert "no adapter_config.json and no adapters" in str(repo_files.adapter_refusal(["model.safetensors"]))
