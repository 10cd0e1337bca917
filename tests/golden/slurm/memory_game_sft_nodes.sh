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
readonly CONFIG=/run/out/configs/sft.toml
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

before_the_limit() { # sft saves when it is told to end; `scontrol requeue` goes on from there
  echo "USR1: saving a checkpoint and ending"
  scancel --signal=TERM "$SLURM_JOB_ID"
  wait "$main"
}

# Each start of the job has its logs in a folder of its own.
LOGS=$("$PYTHON" -m meshrl.core.telemetry.log_folder "$OUTPUT_DIR" sft) || exit 2
export MESHRL_ATTEMPT_BEGUN=1
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$MASTER_ADDR" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export MASTER_ADDR MASTER_PORT WORLD_SIZE=16 LOCAL_WORLD_SIZE=8
srun --overlap --nodes=2 --ntasks=16 --ntasks-per-node=8 \
  --kill-on-bad-exit=1 --open-mode=append --output="$LOGS/node_%n.log" \
  bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank \
  "$PYTHON" -m meshrl.sft.main @ "$CONFIG" "${resume[@]}" &
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
