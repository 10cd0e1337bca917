# meshrl-cpu: orchestrator, rollout and weights. No torch, no CUDA.
#
#   docker build -f deploy/images/cpu.Dockerfile -t meshrl-cpu:0.1.0 .
#
# EXTRAS adds environments: --build-arg EXTRAS="--extra rollout --extra reasoning-gym"
# BASE is any image of Debian or Ubuntu with a Python that meshrl runs on, UV any image with /uv.
# The secret `uv` is a uv.toml, with an index of packages for example; the secret `ca` is a file of certificates to trust.
ARG BASE=python:3.12.12-slim-bookworm
ARG UV=ghcr.io/astral-sh/uv:0.13.9

FROM ${UV} AS uv

FROM ${BASE} AS build
COPY --from=uv /uv /usr/local/bin/uv
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_PROJECT_ENVIRONMENT=/opt/meshrl
ARG EXTRAS="--extra rollout --extra examples"
WORKDIR /src
# What others wrote first: it changes seldom, and stays in the cache.
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY clients/python/pyproject.toml clients/python/README.md clients/python/LICENSE clients/python/
COPY clients/conformance/pyproject.toml clients/conformance/README.md clients/conformance/LICENSE clients/conformance/
COPY configs/pyproject.toml configs/README.md configs/LICENSE configs/
RUN --mount=type=secret,id=uv,target=/etc/uv/uv.toml --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
  uv sync --frozen --no-default-groups --no-install-workspace ${EXTRAS}
COPY clients/python clients/python
COPY configs configs
COPY services services
RUN --mount=type=secret,id=uv,target=/etc/uv/uv.toml --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
  uv sync --frozen --no-default-groups --no-editable ${EXTRAS}

FROM ${BASE}
COPY --from=build /opt/meshrl /opt/meshrl
COPY deploy/images/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/meshrl/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/cache/huggingface
RUN groupadd --gid 10001 meshrl && useradd --uid 10001 --gid 10001 --no-create-home meshrl \
  && mkdir -p /outputs /cache /models && chown 10001:10001 /outputs /cache /models
USER 10001:10001
WORKDIR /outputs
# MESHRL_HEALTH is where the program answers: host:port for gRPC, or a URL. Kubernetes has probes of its own.
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=6 CMD ["python", "/opt/healthcheck.py"]
CMD ["meshrl", "--help"]
