#!/usr/bin/env bash
# Runs COMMAND by Open MPI, on many hosts or on one: launch/mpi.sh [OPTION...] -- COMMAND...
# Marks each line of output with its process; the exit code is that of the first process that failed. For example
#
#   bash launch/mpi.sh --hostfile hosts --map-by ppr:1:node -- jaxllm train configs/quickstart.yaml train.steps=20
#
# OPTION: an option of mpirun, which knows the hosts and how many processes each gets (one drives all GPUs of its host, or one
# for each GPU: --map-by ppr:8:node); or of each process's supervisor (jaxllm/cluster/supervisor.py), such as --restarts 3 (default: 10,
# or 0 for commands that do not resume, such as jaxllm doctor). The checkout, its environment and the folder of the caller must
# be at the same place on all hosts.
#
# On SIGTERM and Ctrl-C the run saves and stops; the exit code is then 75, and the same command resumes the run. The loss of a
# host ends mpirun: `python -m jaxllm.cluster.supervisor -- bash launch/mpi.sh ...` restarts all of it.
#
# JAXLLM_COORDINATOR      host:port of rank 0, the same for all; default: its host's name and a free port, found by a first,
#                         short mpirun
# MPIRUN                  the program; default: mpirun
# PYTHON and JAXLLM_VENV  see environment.sh

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage="mpi.sh [OPTION...] -- COMMAND..."
mpirun="${MPIRUN:-mpirun}"
supervisor=()
options=()
while (($# > 0)) && [[ "$1" != -- ]]; do
  if supervisor_option "$1"; then
    (($# > 1)) || refuse "$1 needs a value: $usage"
    supervisor+=("$1" "$2")
    shift
  else
    options+=("$1")
  fi
  shift
done
(($# > 1)) || refuse "mpi.sh needs the command to run behind --: $usage"
shift

version="$("$mpirun" --version 2>/dev/null | head -n 1)" || refuse "$mpirun cannot be run: install Open MPI (Debian: openmpi-bin), or set MPIRUN."
[[ "$version" =~ "(Open MPI) "([0-9]+) ]] || refuse "$mpirun is not Open MPI's, but '$version': set MPIRUN to the path of Open MPI's."
if ((BASH_REMATCH[1] < 5)); then tag=(--tag-output); else tag=(--output tag); fi
# mpirun gives each process a core or two, but JAX needs all of the host's.
[[ " ${options[*]-} " == *" --bind-to "* ]] || options+=(--bind-to none)

can_resume "$@" || supervisor=(--restarts 0 ${supervisor[@]+"${supervisor[@]}"})
# shellcheck disable=SC2119  # "$@" is the command, not extras
prepare_environment
[[ "$1" != jaxllm ]] || set -- "$python" -m jaxllm.cli "${@:2}"
PATH="$(dirname "$python"):$PATH"
cd "$caller_folder"

share_secret
JAXLLM_LAUNCH_ID="$(launch_id)"
export JAXLLM_LAUNCH_ID PYTHONUNBUFFERED=1
if [[ -z "${JAXLLM_COORDINATOR:-}" ]]; then
  JAXLLM_COORDINATOR="$("$mpirun" "${options[@]}" "$python" "$checkout/launch/meeting_point.py" </dev/null)" ||
    refuse "$mpirun cannot start Python on all hosts: fix the error that it prints above."
fi
export JAXLLM_COORDINATOR

options+=("${tag[@]}" -x PATH)
for name in $(forwarded_variables); do options+=(-x "$name"); done

# Turns mpirun's "[1,0]<stdout>: line" into "[0] line". Runs until mpirun has written everything, whatever signal comes.
mark() {
  trap '' INT TERM HUP USR1 USR2
  local line
  while IFS= read -r line || [[ -n "$line" ]]; do
    if [[ "$line" =~ ^\[[0-9]+,([0-9]+)\]\<std(out|err)\>:\ ?(.*)$ ]]; then
      line="[${BASH_REMATCH[1]}] ${BASH_REMATCH[3]}"
    fi
    printf '%s\n' "$line"
  done
}

# Its own process group: Ctrl-C reaches it only through this script.
set -m
"$mpirun" "${options[@]}" "$python" -m jaxllm.cluster.supervisor ${supervisor[@]+"${supervisor[@]}"} --follow parent -- "$@" \
  </dev/null > >(mark) 2> >(mark >&2) &
pid=$!
set +m

# On SIGTERM mpirun would kill all processes a second later; it forwards SIGUSR1, which supervisors turn into a SIGTERM.
trap 'kill -s USR1 "$pid" 2>/dev/null || true' INT TERM HUP USR1 USR2
# A signal to the whole group ends the sleep, which is not a failure.
while kill -0 "$pid" 2>/dev/null; do sleep 0.2 || true; done
code=0
wait "$pid" || code=$?
exit "$code"
