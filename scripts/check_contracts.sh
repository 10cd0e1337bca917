#!/usr/bin/env bash
# Fails when the contracts break callers of those of the commit in proto/BASELINE. A release moves the baseline.
set -euo pipefail
cd "$(dirname "$0")/.."
baseline=$(cat proto/BASELINE)
git cat-file -e "$baseline^{commit}" 2>/dev/null || {
  echo "this clone lacks commit $baseline, which proto/BASELINE names: run 'git fetch origin $baseline'" >&2
  exit 2
}
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$baseline" proto buf.yaml | tar -x -C "$before"
.tools/buf/node_modules/.bin/buf breaking --against "$before"
