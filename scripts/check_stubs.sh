#!/usr/bin/env bash
# Fails when the committed stubs differ from what proto/ generates now.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
scripts/generate_stubs.sh "$fresh"
if ! diff -r --exclude=__pycache__ clients/python/meshrl/v1 "$fresh/meshrl/v1"; then
  echo "clients/python/meshrl/v1 is not what proto/ generates: run 'make proto' and commit the result" >&2
  exit 1
fi
