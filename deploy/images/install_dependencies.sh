#!/bin/sh
# Installs what meshrl needs into /opt/meshrl, in the versions of the lock file: install_dependencies.sh TORCH EXTRAS...
# TORCH is "locked", a version such as 2.13.0+cpu, or a backend of `uv pip install --torch-backend` such as cpu.
set -eu
torch=$1
shift
if [ "$torch" = locked ]; then
  exec uv sync --frozen --no-default-groups --no-install-workspace "$@"
fi
# Another build of torch has other companions: their versions are left to it.
uv venv /opt/meshrl
uv export --quiet --frozen --no-hashes --no-default-groups --no-emit-workspace "$@" |
  grep -Ev '^(nvidia-|cuda-|triton)' >/tmp/versions.txt
case $torch in
  [0-9]*) exec uv pip install --python /opt/meshrl/bin/python --requirements /tmp/versions.txt "torch==$torch" ;;
  *) exec uv pip install --python /opt/meshrl/bin/python --requirements /tmp/versions.txt --torch-backend "$torch" ;;
esac
