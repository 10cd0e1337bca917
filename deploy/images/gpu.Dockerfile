# meshrl-gpu: trainer and inference. torch brings its own CUDA libraries; the driver is the host's.
#
#   docker build -f deploy/images/gpu.Dockerfile -t meshrl-gpu:0.1.0 .
#
# EXTRAS="--extra trainer --extra inference" leaves vLLM out, for a trainer alone or the embedded engine.
# TORCH=cpu takes torch without CUDA, for a laptop; TORCH=2.13.0+cpu takes that version from an index of the uv.toml.
# BASE is any image of Debian bookworm with a Python that meshrl runs on, UV any image with /uv.
# The secret `uv` is a uv.toml, with an index of packages for example; the secret `ca` is a file of certificates to trust.
ARG BASE=python:3.12.12-slim-bookworm
ARG UV=ghcr.io/astral-sh/uv:0.13.9

FROM ${UV} AS uv

FROM ${BASE} AS build
COPY --from=uv /uv /usr/local/bin/uv
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_PROJECT_ENVIRONMENT=/opt/meshrl
ARG EXTRAS="--extra trainer --extra inference --extra vllm"
ARG TORCH=locked
WORKDIR /src
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY clients/python/pyproject.toml clients/python/README.md clients/python/LICENSE clients/python/
COPY clients/conformance/pyproject.toml clients/conformance/README.md clients/conformance/LICENSE clients/conformance/
COPY configs/pyproject.toml configs/README.md configs/LICENSE configs/
COPY deploy/images/install_dependencies.sh /usr/local/bin/
RUN --mount=type=secret,id=uv,target=/etc/uv/uv.toml --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
  install_dependencies.sh "${TORCH}" ${EXTRAS}
COPY clients/python clients/python
COPY configs configs
COPY services services
RUN --mount=type=secret,id=uv,target=/etc/uv/uv.toml --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
  uv pip install --python /opt/meshrl/bin/python --no-deps ./clients/python ./configs .

FROM ${BASE}
# torch compiles kernels at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc=4:12.2.0-3 libc6-dev=2.36-9+deb12u* libnuma1=2.0.16-1 \
  && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/meshrl /opt/meshrl
COPY deploy/images/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/meshrl/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/cache/huggingface \
  TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
  NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN groupadd --gid 10001 meshrl && useradd --uid 10001 --gid 10001 --no-create-home meshrl \
  && mkdir -p /outputs /cache /models && chown 10001:10001 /outputs /cache /models
USER 10001:10001
WORKDIR /outputs
HEALTHCHECK --interval=15s --timeout=10s --start-period=900s --retries=6 CMD ["python", "/opt/healthcheck.py"]
CMD ["meshrl", "--help"]
