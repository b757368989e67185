#!/usr/bin/env bash
# Simulates N hosts on this machine: launch/local_cluster.sh [OPTION...] N COMMAND...
# Runs COMMAND as N processes that find each other, in the folder of the caller, and marks each line of output with its
# process. The first failure ends the others and gives the exit code. Ctrl-C and SIGTERM are forwarded. For example
#
#   bash launch/local_cluster.sh 2 jaxllm train configs/quickstart.yaml run.cpu_devices=4
#
# OPTION: an option of the supervisor (jaxllm/cluster/supervisor.py), such as --restarts 3. With any of them, each process has a
# supervisor that restarts it when it fails and kills it when it is frozen; a process has then failed when its supervisor gives
# up.
# PYTHON and JAXLLM_VENV: see environment.sh.

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

grace_s=10

supervisor=()
while supervisor_option "${1:-}"; do
  (($# > 1)) || refuse "$1 needs a value: local_cluster.sh [OPTION...] N COMMAND..."
  supervisor+=("$1" "$2")
  shift 2
done
[[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || refuse "give the number of processes first, not '${1:-}': local_cluster.sh N COMMAND..."
(($# > 1)) || refuse "local_cluster.sh $1 needs the command to run: local_cluster.sh N COMMAND..."
count="$1"
shift

# shellcheck disable=SC2119  # "$@" is the command, not extras
prepare_environment
[[ "$1" != jaxllm ]] || set -- "$python" -m jaxllm.cli "${@:2}"
((${#supervisor[@]} == 0)) || set -- "$python" -m jaxllm.cluster.supervisor "${supervisor[@]}" --follow parent -- "$@"
PATH="$(dirname "$python"):$PATH"
cd "$caller_folder"

meeting_point="$("$python" "$checkout/launch/meeting_point.py")"
export JAXLLM_COORDINATOR="127.0.0.1:${meeting_point##*:}" JAXLLM_NUM_PROCESSES="$count" PYTHONUNBUFFERED=1
share_secret
JAXLLM_LAUNCH_ID="$(launch_id)"
export JAXLLM_LAUNCH_ID

# Runs until its process has written everything, whatever signal comes.
mark() {
  trap '' INT TERM HUP USR1 USR2
  local line
  while IFS= read -r line || [[ -n "$line" ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

# A signal that comes before all have started is sent to them afterwards.
pending_signal=""
trap 'pending_signal=INT' INT
trap 'pending_signal=TERM' TERM HUP USR1 USR2

# Each process has its own group: a signal reaches its children too, and Ctrl-C reaches them only through this script.
set -m
pids=()
for ((rank = 0; rank < count; rank++)); do
  JAXLLM_PROCESS_ID="$rank" "$@" </dev/null > >(mark "$rank") 2> >(mark "$rank" >&2) &
  pids+=($!)
done
set +m

send() {
  local pid
  for pid in "${pids[@]}"; do kill -s "$1" -- "-$pid" 2>/dev/null || true; done
}
trap 'send INT' INT
trap 'send TERM' TERM HUP USR1 USR2
[[ -z "$pending_signal" ]] || send "$pending_signal"

# Polls rather than waits: "wait -n" is not in every bash, and does not tell which process ended.
first_code=0
kill_at=""
running=("${!pids[@]}")
while ((${#running[@]})); do
  left=()
  for rank in "${running[@]}"; do
    if kill -0 "${pids[rank]}" 2>/dev/null; then
      left+=("$rank")
      continue
    fi
    code=0
    wait "${pids[rank]}" 2>/dev/null || code=$?
    if ((code && !first_code)); then
      first_code=$code
      kill_at=$((SECONDS + grace_s))
      what="failed with exit code $code"
      ((code != 75)) || what="was stopped by a signal"
      say "process $rank $what; ending the others" >&2
      # The group of a process that failed at once holds a `mark` that may not ignore signals yet.
      sleep 0.2 || true
      send TERM
    fi
  done
  running=(${left[@]+"${left[@]}"})
  if [[ -n "$kill_at" ]] && ((SECONDS >= kill_at)); then send KILL; fi
  # A signal to the whole group ends the sleep, which is not a failure.
  ((${#running[@]} == 0)) || sleep 0.1 || true
done
exit "$first_code"
