#!/usr/bin/env bash
# Runs COMMAND on the hosts of a file, by ssh: launch/ssh.sh [OPTION...] HOSTS COMMAND...
# Marks each line of output with its process. The first failure ends the others and gives the exit code. For example
#
#   bash launch/ssh.sh hosts.txt jaxllm train configs/quickstart.yaml train.steps=20
#
# HOSTS: one line per process, in rank order: a host, or user@host; # begins a comment. The first is process 0, which the
# others must reach by that host's name or address. Each host must accept a login without a password, and have the checkout, its
# environment and the folder of the caller at the same place as here.
# OPTION: --least-hosts N, for jaxllm train: when hosts are lost, the others train on as long as N are left, and take a host back
# when ssh reaches it again (docs/launch.md); this adds launch.least_hosts=N to COMMAND. Or an option of each process's supervisor
# (jaxllm/cluster/supervisor.py) on its host, such as --restarts 3 (default: 10, or 0 for commands that do not resume, such as
# jaxllm doctor).
#
# On SIGTERM and Ctrl-C the run saves and stops; the exit code is then 75, and the same command resumes the run. A broken
# connection, or the end of this script, has the same effect. Without --least-hosts the loss of a host ends all processes:
# `python -m jaxllm.cluster.supervisor -- bash launch/ssh.sh ...` restarts them.
#
# JAXLLM_COORDINATOR      host:port of process 0, the same for all; default: ssh's address of the first line, and a free port
# SSH                     the program and its options; default: ssh
# PYTHON and JAXLLM_VENV  see environment.sh

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

supervisor=()
least_hosts=0
while supervisor_option "${1:-}" || [[ "${1:-}" == --least-hosts ]]; do
  (($# > 1)) || refuse "$1 needs a value: ssh.sh [OPTION...] HOSTS COMMAND..."
  if [[ "$1" == --least-hosts ]]; then
    [[ "$2" =~ ^[1-9][0-9]*$ ]] || refuse "--least-hosts $2 is not a number of hosts: ssh.sh --least-hosts N HOSTS COMMAND..."
    least_hosts="$2"
  else
    supervisor+=("$1" "$2")
  fi
  shift 2
done
(($# > 1)) || refuse "give a file of hosts and the command to run: ssh.sh [OPTION...] HOSTS COMMAND..."
hosts="$(absolute "$1")"
shift

if ((least_hosts)); then set -- "$@" "launch.least_hosts=$least_hosts"; fi
can_resume "$@" || supervisor=(--restarts 0 ${supervisor[@]+"${supervisor[@]}"})
# shellcheck disable=SC2119  # "$@" is the command, not extras
prepare_environment
[[ "$1" != jaxllm ]] || set -- "$python" -m jaxllm.cli "${@:2}"
cd "$caller_folder"
share_secret
JAXLLM_LAUNCH_ID="$(launch_id)"
export JAXLLM_LAUNCH_ID PYTHONUNBUFFERED=1
exec "$python" "$checkout/launch/over_ssh.py" "$hosts" "$least_hosts" "$(forwarded_variables)" ${supervisor[@]+"${supervisor[@]}"} -- "$@"
