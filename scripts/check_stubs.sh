#!/usr/bin/env bash
# Fails when the committed stubs differ from what proto/ generates now. The generator for TypeScript comes from npm.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
scripts/generate_stubs.sh "$fresh"
scripts/generate_typescript.sh "$fresh/typescript"
compare() { # COMMITTED GENERATED
  if ! diff -r --exclude=__pycache__ "$1" "$2"; then
    echo "$1 is not what proto/ generates: run 'make proto' and commit the result" >&2
    exit 1
  fi
}
compare clients/python/meshrl/v1 "$fresh/meshrl/v1"
compare clients/typescript/src/gen "$fresh/typescript"
