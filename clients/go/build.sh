#!/usr/bin/env bash
# Builds the Go client and checks it against the contract's vectors: build.sh [OUT] makes OUT/bin/meshrl-go.
# Code is generated from proto/ into OUT. Packages are those of Debian or Ubuntu, which README.md lists.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
proto=$here/../../proto
out=$(realpath -m "${1:-$here/build}")
rm -rf "$out/src"
mkdir -p "$out/src/meshrl.dev/go" "$out/bin"
(cd "$proto" && find . -name '*.proto' -printf '%P\0' | sort -z |
  xargs -0 protoc -I . --go_out="$out/src" --go-grpc_out="$out/src")
cp -r "$here"/*.go "$here/cmd" "$out/src/meshrl.dev/go"
export GO111MODULE=off GOPATH="$out:/usr/share/gocode" MESHRL_VECTORS=$proto/vectors
go vet meshrl.dev/go meshrl.dev/go/cmd/meshrl-go
go test -count=1 meshrl.dev/go
go build -o "$out/bin/meshrl-go" meshrl.dev/go/cmd/meshrl-go
