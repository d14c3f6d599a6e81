#!/bin/sh
# Prints the path of a Python that can hold this project's environment: one that runs, is 3.12 or newer and can make a
# virtual environment. Otherwise says in one line on stderr what it found instead, and fails.
#
#   PYTHON=/path/to/python   take this one and no other
set -u

probe='
import sys, sysconfig
# The base interpreter: an activated environment must not be asked to replace itself.
path = getattr(sys, "_base_executable", sys.executable)
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 12):
    print("old", version, path)
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("free-threaded", version, path)
else:
    try:
        import ensurepip, venv
        print("good", version, path)
    except ImportError:
        print("without-venv", version, path)
'
found=

# try COMMAND: prints the interpreter and ends the search if it will do, else remembers why it will not. A version
# manager may have put a wrapper of that name on PATH that starts nothing, so it has to run to count.
try() {
    answer=$("$1" -c "$probe" 2>/dev/null </dev/null) || answer=
    read -r state version path <<EOF
$answer
EOF
    case "$state" in
        good) printf '%s\n' "$path"; exit 0 ;;
        old) note="Python $version at $path" ;;
        without-venv) note="Python $version at $path (no venv module: install the system's python3-venv package)" ;;
        free-threaded) note="Python $version at $path (free-threaded)" ;;
        *) return ;;
    esac
    case "$found" in
        *"$note"*) ;;
        *) found="${found:+$found, }$note" ;;
    esac
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    echo "kvsparse-jax needs Python 3.12 or newer; PYTHON=$PYTHON is ${found:-no Python that runs}" >&2
    exit 1
fi

for name in python3 python3.14 python3.13 python3.12 python; do
    command -v "$name" >/dev/null 2>&1 && try "$name"
done
pyenv_root=${PYENV_ROOT:-}
if [ -z "$pyenv_root" ] && command -v pyenv >/dev/null 2>&1; then
    pyenv_root=$(pyenv root 2>/dev/null)
fi
for path in "${pyenv_root:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    [ -x "$path" ] && try "$path"
done
if command -v uv >/dev/null 2>&1; then
    path=$(uv python find --no-project --no-python-downloads '>=3.12' 2>/dev/null) && try "$path"
fi

echo "kvsparse-jax needs Python 3.12 or newer; found only: ${found:-no Python that runs} (set PYTHON=/path/to/python)" >&2
exit 1
