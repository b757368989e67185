# shellcheck shell=bash
# Sourced by the scripts beside it. Makes errors fatal, changes to the checkout and provides
#
#   prepare_environment [EXTRA...]  sets $python to an interpreter that has jaxllm with these extras, and CUDA if there
#                                   is a GPU; installs only what pyproject.toml or the extras made necessary since,
#                                   in the versions of the file that $constraints names, if it is set
#   use_wheels FOLDER               before that: use the current Python as it is, with the wheels of the folder
#   run_check NAME COMMAND...       runs a command and records its result
#   closing_summary                 prints the recorded results; returns the exit code of the first failure
#   supervisor_option WORD          whether it is an option of jaxllm/cluster/supervisor.py that launch scripts accept
#   can_resume COMMAND...           whether this command resumes its work when it is restarted
#   launch_id                       prints a name for this launch of a job, the given one if there is one
#   share_secret                    exports a secret for the processes of this launch, unless one is given
#   forwarded_variables             prints the names of variables set here that processes on other hosts need too
#
# PYTHON       the interpreter to build the environment from; default: the newest of Python 3.13, 3.12 and 3.11 that is on the
#              PATH or that pyenv has, since a newer Python gets a newer JAX (3.11: 0.10; from 3.12 on: 0.12)
# JAXLLM_VENV  the folder of the environment; default: .venv in the checkout. `none` installs nothing and uses the
#              current Python as it is, for machines that have JAX and no network

set -euo pipefail

caller_folder="$PWD"
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$checkout"

# The caller's path, as an absolute one, since the scripts run in the checkout.
absolute() {
  case "$1" in
    /*) echo "$1" ;;
    *) echo "$caller_folder/$1" ;;
  esac
}

venv="${JAXLLM_VENV:-$checkout/.venv}"
[[ "$venv" == none ]] || venv="$(absolute "$venv")"
python=""
constraints=""

say() { echo "jaxllm: $*"; }

refuse() {
  say "$@" >&2
  exit 2
}

have_gpu() { nvidia-smi >/dev/null 2>&1; }

# --------------------------------------------------------------------------------------------------------- environment

prepare_environment() {
  local cuda
  if [[ "$venv" == none ]]; then
    use_current_python
    return
  fi
  [[ -x "$venv/bin/python" ]] || make_venv
  python="$venv/bin/python"
  is_new_enough "$python" || refuse "$venv holds a Python older than 3.11: remove it, or set JAXLLM_VENV."
  cuda="$(cuda_extra)"
  install_jaxllm "$@" ${cuda:+"$cuda"} || {
    say "the installation failed; if there is no network here but Python has JAX, set JAXLLM_VENV=none." >&2
    exit 1
  }
}

use_current_python() {
  python="$(find_python)"
  export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}"
  local module
  for module in jax flax optax orbax.checkpoint numpy cryptography pydantic yaml typer rich jaxtyping; do
    has_module "$module" || refuse "JAXLLM_VENV=none, but $python has no $module: install it, or unset JAXLLM_VENV."
  done
}

# use_wheels FOLDER: the current Python, and the wheels of a folder (pack_wheels.sh), installed into a temporary one. No network.
use_wheels() {
  local wheels=("$1"/*.whl)
  [[ -e "${wheels[0]}" ]] || refuse "WHEELS=$1 is a folder without wheels: fill it with launch/pack_wheels.sh."
  python="$(find_python)"
  site="$(mktemp -d)"
  trap 'rm -rf "$site"' EXIT
  pip_install --no-index --no-deps --no-compile --target "$site" "${wheels[@]}" ||
    refuse "the wheels in WHEELS=$1 do not fit $("$python" --version): pack them for that version with launch/pack_wheels.sh."
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  venv=none
}

# The Python in use: PYTHON, or the first one of the PATH that is new enough.
find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    is_new_enough "$PYTHON" || refuse "PYTHON=$PYTHON is not a Python 3.11 or newer: correct or unset it."
    command -v "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if is_new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  refuse "no Python 3.11 or newer found: install one, or set PYTHON to its path."
}

# For a new environment: PYTHON, or the newest one that can make environments, or else the Python in use.
newest_python() {
  local version candidate
  if [[ -z "${PYTHON:-}" ]]; then
    for version in 3.13 3.12 3.11; do
      for candidate in "python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3; do
        if is_version "$candidate" "$version" && can_make_venv "$candidate"; then
          command -v "$candidate"
          return
        fi
      done
    done
  fi
  find_python
}

is_version() { [[ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" == "$2" ]]; }

# Debian and Ubuntu ship Python without ensurepip and venv; one built by hand may lack the others, which pip and tests import.
can_make_venv() { "$1" -c 'import bz2, ctypes, ensurepip, lzma, ssl, venv' >/dev/null 2>&1; }

# Runs it rather than asks for its path: a version manager puts names on the PATH that lead nowhere.
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

has_module() {
  "$python" -c '
import importlib.util, sys
try:
    sys.exit(importlib.util.find_spec(sys.argv[1]) is None)
except ModuleNotFoundError:
    sys.exit(1)
' "$1"
}

make_venv() {
  local base
  base="$(newest_python)"
  can_make_venv "$base" ||
    refuse "$base cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)."
  say "making a virtual environment in $venv with $("$base" --version)"
  "$base" -m venv "$venv" || refuse "cannot make a virtual environment in $venv: set JAXLLM_VENV to another folder."
}

# cuda12 or cuda13, whichever the driver can run; nothing without a GPU.
cuda_extra() {
  local table
  table="$(nvidia-smi 2>/dev/null)" || return 0
  # Newer drivers write "CUDA UMD Version".
  if [[ "$table" =~ CUDA[A-Za-z\ ]*Version:\ *([0-9]+) ]] && ((BASH_REMATCH[1] >= 13)); then
    echo cuda13
  else
    echo cuda12
  fi
}

# install_jaxllm EXTRA...: jaxllm itself, editable, and the extras that this pyproject.toml has not installed before.
install_jaxllm() {
  [[ "$venv" != none ]] || return 0
  local stamp="$venv/jaxllm-installed" version extra line extras="" lines="" start=$SECONDS
  version="$(cat pyproject.toml ${constraints:+"$constraints"} | cksum) $checkout"
  for extra in "" "$@"; do
    line="$version [$extra]"
    if ! grep -qxF "$line" "$stamp" 2>/dev/null; then
      lines+="$line"$'\n'
      extras+="${extra:+${extras:+,}$extra}"
    fi
  done
  [[ -n "$lines" ]] || return 0
  say "installing jaxllm${extras:+[$extras]} into $venv, once; a minute or more ..."
  pip_install --editable ".${extras:+[$extras]}" || return 1
  printf '%s' "$lines" >>"$stamp"
  say "installed in $((SECONDS - start)) s"
}

pip_install() {
  "$python" -m pip install -qq --disable-pip-version-check --no-input ${constraints:+--constraint "$constraints"} "$@" </dev/null
}

# ------------------------------------------------------------------------------------------------------------ launching

supervisor_option() {
  case "$1" in
    --restarts | --backoff-s | --silent-after | --anew-after | --hang-up) ;;
    *) return 1 ;;
  esac
}

# Only these of jaxllm's commands resume. Other programs are assumed to resume too.
can_resume() {
  case "$*" in
    "jaxllm train "* | "jaxllm data prepare "*) ;;
    jaxllm | "jaxllm "*) return 1 ;;
  esac
}

# The name stays the same if a supervisor restarts the launch script itself.
launch_id() { echo "${JAXLLM_LAUNCH_ID:-$HOSTNAME-$$-$(date +%s)}"; }

# Like the name, it stays the same if a supervisor restarts the launch script.
share_secret() {
  [[ -z "${JAXLLM_SECRET+given}${JAXLLM_SECRET_FILE+given}" ]] || return 0
  JAXLLM_SECRET="$(od -A n -t x1 -N 32 /dev/urandom | tr -d ' \n')"
  export JAXLLM_SECRET
}

# Variables of a single process stay here, and so do those for this machine's environment only.
forwarded_variables() {
  compgen -e | grep -E '^(JAXLLM|JAX|XLA|TF|NCCL|HF|WANDB|MLFLOW|OMP)_|^(PYTHONPATH|PYTHONUNBUFFERED|LD_LIBRARY_PATH)$' |
    grep -vxE 'JAXLLM_(VENV|BEAT_FD|PROCESS_ID)|JAX_(NUM_PROCESSES|PROCESS_ID)' || true
}

# -------------------------------------------------------------------------------------------------------------- checks

check_lines=""
first_failure=0

run_check() {
  local name="$1" code=0 start=$SECONDS verdict
  shift
  echo
  say "$name"
  "$@" || code=$?
  verdict="ok"
  if ((code)); then
    verdict="FAILED, exit code $code"
    ((first_failure)) || first_failure=$code
  fi
  check_lines+="$(printf '  %-24s %5d s  %s' "$name" $((SECONDS - start)) "$verdict")"$'\n'
}

closing_summary() {
  echo
  say "summary"
  printf '%s' "$check_lines"
  return "$first_failure"
}
