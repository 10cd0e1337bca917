#!/bin/bash
#SBATCH --job-name=two
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --output=/run/out/slurm/%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -uo pipefail

readonly PYTHON=/venv/bin/python
readonly OUTPUT_DIR=/run/out
readonly CONFIG=/run/out/configs/inference.toml
export SLURM_EXPORT_ENV=ALL # what sbatch was given reaches every step
export PYTHONUNBUFFERED=1

# The configuration travels in this script, so that the first node needs no file of the one that submitted it.
mkdir -p "$OUTPUT_DIR/configs" || exit 2
(umask 077 && cat >"$CONFIG") <<'END_OF_CONFIGURATION'
...
END_OF_CONFIGURATION

# A job that was put back into the queue goes on from its newest checkpoint.
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && compgen -G "$OUTPUT_DIR/checkpoints/step_*" >/dev/null; then
  resume=(--ckpt.resume-step -1)
fi
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))${resume:+, resuming}"

before_the_limit() {
  echo "USR1: an engine has nothing to save"
}

address_of() { # of a node, at which SLURM and the other nodes reach it
  scontrol show node "$1" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2
}
NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # those that serve
for node in $NODES; do
  echo "engine on $node, for client.base_url: http://$(address_of "$node"):8000/v1"
done
# Each start of the job has its logs in a folder of its own.
LOGS=$("$PYTHON" -m meshrl.core.telemetry.log_folder "$OUTPUT_DIR" inference) || exit 2
export MESHRL_ATTEMPT_BEGUN=1
# One engine over all nodes: the first one serves, the others hold copies of the model for it.
RPC_PORT=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
srun --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 \
  --open-mode=append --output="$LOGS/node_%n.log" \
  bash -c 'if [ "$SLURM_NODEID" -gt 0 ]; then
    set -- "$@" --headless --data-parallel-start-rank "$((SLURM_NODEID * 2))"
  else
    ADDRESS=$(scontrol show node "$SLURMD_NODENAME" | grep -o "NodeAddr=[^ ]*" | cut -d= -f2)
    set -- "$@" --server.host "$ADDRESS"
  fi; exec "$@"' engine \
  "$PYTHON" -m meshrl.inference.main @ "$CONFIG" --data-parallel-address "$(address_of "$NODES")" \
  --data-parallel-rpc-port "$RPC_PORT" --data-parallel-size-local 2 &
main=$!
put_back() { # the next start goes on from what is saved
  [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ] || return
  echo "$1: requeueing"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
}
cancelled=
trap 'cancelled=1' TERM # scancel tells every process of the job
trap before_the_limit USR1
while :; do # a signal ends `wait`, not the program
  wait "$main"
  code=$?
  kill -0 "$main" 2>/dev/null || break
done

# A run that failed because a node went away goes back into the queue. Nodes that answer had no part in it.
if [ -z "$cancelled" ] && [ "$code" -ne 0 ] && [ "$code" -ne 2 ] &&
  ! timeout 60 srun --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 true; then
  put_back "a node of this job does not answer"
fi
exit "$code"
