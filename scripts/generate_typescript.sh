#!/usr/bin/env bash
# Regenerates clients/typescript/src/gen from proto/, with buf of .tools and the generator that the package's lock file
# pins. Usage: generate_typescript.sh [OUT]
set -euo pipefail
cd "$(dirname "$0")/../clients/typescript"
out=${1:-src/gen}
buf=$PWD/../../.tools/buf/node_modules/.bin/buf
[ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --silent --no-audit --no-fund
rm -rf "$out"
PATH=$PWD/node_modules/.bin:$PATH "$buf" generate --template "$(sed "s|^    out: .*|    out: $out|" buf.gen.yaml)"
