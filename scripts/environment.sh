#!/bin/sh
# Makes or updates the project's environment. Says nothing and takes no time when it is up to date.
#
#   scripts/environment.sh VENV       the environment, with the project (editable) and the tests' packages
#   scripts/environment.sh VENV aot   also VENV/aot: the packages that compile for a GPU or TPU, apart from the
#                                     environment because jax would try to use them in every program
set -eu
cd "$(dirname "$0")/.."
venv=$1
python=$venv/bin/python
log=$venv/install.log
busy=$venv/.incomplete       # names the process at work; one that was killed leaves it behind
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    echo "error: $1" >&2
    exit 1
}

# install WHAT PIP-ARGUMENTS...: pip's output goes to the log, and only its errors are shown.
install() {
    what=$1
    shift
    echo $$ >"$busy"
    if ! "$python" -m pip install "$@" >>"$log" 2>&1; then
        rm -f "$busy"
        grep -iE '^ *error:' "$log" | tail -n 5 >&2
        fail "could not install $what (whole log: $log)"
    fi
    rm -f "$busy"
}

if [ -e "$busy" ]; then
    owner=$(cat "$busy")
    if [ -n "$owner" ] && kill -0 "$owner" 2>/dev/null; then
        fail "process $owner is making $venv: wait for it, or remove $venv if that process is something else"
    fi
    echo "$venv was left half made: making it again" >&2
    rm -rf "$venv"
fi

# Complete means: for this very project file, in this place (an editable install records the folder).
wanted="$(cksum <pyproject.toml) $(pwd -P)"
complete=$venv/.complete
if [ ! -x "$python" ] || [ "$(cat "$complete" 2>/dev/null)" != "$wanted" ]; then
    if "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        echo "bringing $venv up to date (log: $log)" >&2
    else
        base=$(scripts/find_python.sh)
        if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
            fail "$venv exists and is not a Python environment"
        fi
        echo "making $venv with $base (a minute or two; log: $log)" >&2
        rm -rf "$venv"
        mkdir -p "$venv"
        echo $$ >"$busy"
        "$base" -m venv "$venv" >"$log" 2>&1 || fail "could not make a virtual environment: $(tail -n 1 "$log")"
    fi
    rm -f "$complete" "$venv/aot/.complete"
    install "the project's packages" --editable '.[test]'
    echo "$wanted" >"$complete.new"
    mv "$complete.new" "$complete"
fi

if [ "${2:-}" = aot ]; then
    # The plugin has to be of jaxlib's version, libtpu of the one that jax names. jax itself is left out: the environment
    # has it.
    requirements=$("$python" - <<'END'
import importlib.metadata
import tomllib

with open("pyproject.toml", "rb") as f:
    extra = tomllib.load(f)["project"]["optional-dependencies"]["aot"]
version = importlib.metadata.version("jaxlib")
libtpu = [r.partition(";")[0].strip() for r in importlib.metadata.requires("jax") if r.startswith("libtpu")]
plugin = [f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
print(*plugin, *libtpu, *(r for r in extra if not r.startswith("jax[")))
END
)
    wanted="$wanted $requirements"
    complete=$venv/aot/.complete
    if [ "$(cat "$complete" 2>/dev/null)" != "$wanted" ]; then
        echo "installing what compiles for GPUs and TPUs into $venv/aot (1.1 GB; log: $log)" >&2
        rm -rf "$venv/aot"
        # shellcheck disable=SC2086  # one word per requirement
        install "the packages that compile for GPUs and TPUs" --no-deps --target "$venv/aot" $requirements
        echo "$wanted" >"$complete"
    fi
fi
