#!/usr/bin/env bash
# Regenerates meshrl/v1 from proto/. The generator is pinned: code that 1.76 makes runs on
# protobuf 6 and 7, and inference stacks pin either. Usage: generate_stubs.sh [SOURCE_ROOT]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-clients/python}
mkdir -p "$out"
"${UV:-uv}" run --no-project --isolated --quiet --with grpcio-tools==1.76.0 --with 'setuptools<81' \
  python -W ignore scripts/generate_stubs.py "$out"
