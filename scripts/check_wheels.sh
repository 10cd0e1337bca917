#!/usr/bin/env bash
# Builds sdist and wheel of each distribution (the wheels from the sdists), installs them into an empty environment in
# the versions of the lock file, and makes a run of two steps there, away from the checkout.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
uv=${UV:-uv}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$uv" build --quiet --all-packages --out-dir "$work/dist" "$root"
ls "$work/dist"
"$uv" export --quiet --frozen --project "$root" --no-hashes --no-dev --no-emit-workspace --extra all --output-file "$work/versions.txt"
"$uv" venv --quiet "$work/venv"
"$uv" pip install --quiet --python "$work/venv/bin/python" --constraint "$work/versions.txt" --find-links "$work/dist" \
  "meshrl[rollout,trainer,inference,examples] @ file://$(ls "$work"/dist/meshrl-[0-9]*.whl)"
"$uv" pip install --quiet --python "$work/venv/bin/python" --no-deps "$work"/dist/meshrl_conformance-*.whl
"$uv" pip check --quiet --python "$work/venv/bin/python"

cd "$work"
cp "$(venv/bin/python -c 'from meshrl.environments import reverse_text; print(*reverse_text.__path__)')/rl.toml" . # which the wheel has
venv/bin/python -c 'import meshrl.launch, sys; sys.exit("site-packages" not in meshrl.launch.__file__)'
venv/bin/python -m meshrl.environments.reverse_text.model model
venv/bin/meshrl conformance --help >/dev/null # which a distribution of its own adds
venv/bin/rl @ rl.toml --model.name model --output-dir run --max-steps 2 --slurm --dry-run >/dev/null # the templates are there
venv/bin/rl @ rl.toml --model.name model --output-dir run --max-steps 2 --orchestrator.batch-size 16 --orchestrator.group-size 4
test "$(wc -l <run/metrics.jsonl)" -ge 2
echo "wheels: installed in an empty environment, and a run of two steps was made"
