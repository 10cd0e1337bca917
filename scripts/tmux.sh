#!/usr/bin/env bash
# Opens a tmux session beside a run: a window "Launcher" for commands, and a window "Logs" with four panes that follow
# the trainer, the orchestrator, inference and the environments. Start it before the run or during it.
#
#   bash scripts/tmux.sh [-s SESSION] [-o OUTPUT_DIR]
#   bash scripts/tmux.sh [SESSION [OUTPUT_DIR]]
set -euo pipefail

usage() {
  echo "usage: $0 [-s SESSION] [-o OUTPUT_DIR], or $0 [SESSION [OUTPUT_DIR]]" >&2
  exit 2
}

session=meshrl
output_dir=outputs
while getopts "s:o:h" option; do
  case $option in
    s) session=$OPTARG ;;
    o) output_dir=$OPTARG ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[ $# -le 2 ] || usage
session=${1:-$session}
output_dir=${2:-$output_dir}
case $output_dir in
  /*) ;;
  *) output_dir=$PWD/$output_dir ;;
esac
case $session in
  *[.:]* | "") echo "$0: a session's name has no '.' and no ':', got '$session'" >&2 && exit 2 ;;
esac
command -v tmux >/dev/null || { echo "$0: tmux is not installed: apt-get install tmux" >&2 && exit 2; }

# Run in a pane: follows each file of a pattern from its first line on, also those that come later.
follow='
IFS=$'\''\n'\''
declare -A followed
while :; do
  for file in $(compgen -G "$1"); do
    [ -n "${followed[$file]:-}" ] || { followed[$file]=1; tail -n +1 -F "$file" 2>/dev/null & }
  done
  sleep 1
done'

if ! tmux has-session -t "=$session" 2>/dev/null; then
  tmux new-session -d -s "$session" -n Launcher -x 200 -y 50
  # Says where the run's files go, so that `meshrl` and a new run find them.
  tmux send-keys -t "$session:Launcher" "export MESHRL_OUTPUT_DIR=$(printf '%q' "$output_dir")" Enter
  shown=(
    "Trainer:trainer.log"
    "Orchestrator:orchestrator.log"
    "Inference:inference*.log"
    "Environments:envs/*/*/*.log"
  )
  for place in "${!shown[@]}"; do
    title=${shown[$place]%%:*} pattern=${shown[$place]#*:}
    following=(bash -c "$follow" follow "$output_dir/logs/$pattern")
    if [ "$place" -eq 0 ]; then
      tmux new-window -d -t "$session" -n Logs "${following[@]}"
    else
      tmux split-window -d -t "$session:Logs.$((place - 1))" "${following[@]}"
    fi
    tmux select-layout -t "$session:Logs" tiled >/dev/null
    tmux select-pane -t "$session:Logs.$place" -T "$title"
  done
  tmux set-option -w -t "$session:Logs" pane-border-status top
  tmux set-option -w -t "$session:Logs" pane-border-format " #{pane_title} "
fi
if [ -t 1 ]; then
  if [ -n "${TMUX:-}" ]; then exec tmux switch-client -t "=$session"; else exec tmux attach-session -t "=$session"; fi
fi
echo "session $session follows $output_dir: tmux attach -t $session"
