#!/usr/bin/env bash
# Builds the images where neither Docker nor a registry of images can be reached: on a base of Debian's packages, by
# buildah in a chroot. Needs root, and `apt-get install buildah mmdebstrap`.
#
#   scripts/build_images.sh [cpu] [laptop] [gpu]     by default cpu and laptop
#
# UV_TOML is a uv.toml for the build, with an index of packages for example; CA_FILE has the certificates to trust.
# TORCH is the torch of `laptop`: cpu, or a version such as 2.13.0+cpu that an index or folder of UV_TOML has.
set -euo pipefail
cd "$(dirname "$0")/.."
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
uv=$(command -v "${UV:-uv}" || echo .tools/uv/bin/uv)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
base=localhost/meshrl-base:bookworm
tool=localhost/meshrl-uv:$("$uv" --version | cut -d' ' -f2)
[ $# -gt 0 ] || set -- cpu laptop

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
import() { # IMAGE SOURCE DESTINATION: an image that holds one thing; an archive is unpacked
  local container
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$2" "$3"
  buildah commit --quiet --rm "$container" "$1"
}
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  mmdebstrap --quiet --variant=minbase --include=python3,ca-certificates bookworm "$scratch/base.tar"
  import "$base" "$scratch/base.tar" /
fi
import "$tool" "$uv" /uv

secrets=(${UV_TOML:+--secret "id=uv,src=$UV_TOML"} ${CA_FILE:+--secret "id=ca,src=$CA_FILE"})
build() { # NAME DOCKERFILE FLAGS...; only Docker's format keeps the healthcheck
  local image=$1:$version file=deploy/images/$2.Dockerfile
  shift 2
  buildah build --format docker --layers --build-arg BASE="$base" --build-arg UV="$tool" "${secrets[@]}" "$@" \
    --file "$file" --tag "localhost/$image" .
}
for name in "$@"; do
  case $name in
    cpu) build meshrl-cpu cpu ;;
    laptop) build meshrl-laptop gpu --build-arg TORCH="${TORCH:-cpu}" --build-arg EXTRAS="--extra trainer --extra inference" ;;
    gpu) build meshrl-gpu gpu ;;
    *) echo "no image is called $name: use cpu, laptop or gpu" >&2 && exit 2 ;;
  esac
done
buildah images --filter "reference=localhost/meshrl-*"
