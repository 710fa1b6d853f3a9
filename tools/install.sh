#!/usr/bin/env bash
# Create the environment and install what requirements.txt and requirements-teaching.txt ask for; what is missing is said
# in one line, with the remedy.
#   bash tools/install.sh .venv
set -u
venv=$1
python=${PYTHON:-python3}
need=${DISK_MB:-3000} # MB, with the CPU build of torch

stop() { echo "error: $1" >&2; exit 1; }
free() { df -Pm . | awk 'NR == 2 { print $4 }'; }

command -v "$python" >/dev/null ||
    stop "no $python here; install Python 3.11 or newer (Debian, Ubuntu: sudo apt install python3 python3-venv) or call make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "$("$python" --version 2>&1) is too old; install Python 3.11 or newer and call, for example, make PYTHON=python3.11"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "the venv module of $python is missing; on Debian or Ubuntu: sudo apt install python3-venv"
    [ "$(free)" -ge "$need" ] || stop "$(free) MB are free here and about $need MB are needed; free some, or clone to a larger disk"
    echo "Creating $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv" || stop "$python -m venv $venv failed, see above; on Debian or Ubuntu: sudo apt install python3-venv"
fi

echo "Installing requirements.txt and requirements-teaching.txt into $venv (once; about two minutes on a fast network)"
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" 2> >(tee -a "$errors" >&2); }
# Of jax-privacy only the audits are compared, which need nothing of jax: so without what it depends on, half a gigabyte.
if ! install -r requirements.txt -r requirements-teaching.txt || ! install --no-deps "jax-privacy==2.0.0" || ! install --no-deps --no-build-isolation -e .; then
    grep -q "No space left" "$errors" &&
        stop "the disk is full (here or in ${TMPDIR:-/tmp}); about $need MB are needed, and 4000 MB more where pip takes torch with CUDA"
    stop "pip could not install everything, see above; check the network and call make again"
fi
touch "$venv/.installed"
