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
# The generator of clients/typescript comes from npm: where it was never installed, CI compares.
if [ -d clients/typescript/node_modules ] || [ -n "${CI:-}" ]; then
  scripts/generate_typescript.sh "$fresh/typescript"
  if ! diff -r clients/typescript/src/gen "$fresh/typescript"; then
    echo "clients/typescript/src/gen is not what proto/ generates: run 'make proto' and commit the result" >&2
    exit 1
  fi
else
  echo "clients/typescript/src/gen is not compared: its packages are not installed (npm ci there)" >&2
fi
