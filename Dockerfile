# Two images from one file: --target cpu (any x86_64 machine with AVX2) and --target gpu (NVIDIA).
#
#   docker build --target cpu -t tidegate:0.1.0-cpu .
#   docker run --init --shm-size 2g --stop-timeout 180 --ulimit nofile=1048576 \
#     -p 127.0.0.1:8080:8080 -e TIDEGATE_ALLOW_UNAUTHENTICATED=1 \
#     -v tidegate-state:/var/lib/tidegate -v tidegate-cache:/var/cache/tidegate \
#     -v "$PWD/deployments/smollm2-cpu.yaml:/etc/tidegate/deployment.yaml:ro" tidegate:0.1.0-cpu
#
# TIDEGATE_GATEWAY_HOST=0.0.0.0 overrides the deployment's gateway.host, because a published port needs the
# container's own address. The admin port is not published.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# Base of both: an unprivileged user, and the directories of the volumes.
FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/tidegate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/var/cache/tidegate \
    TRITON_CACHE_DIR=/var/cache/tidegate/triton \
    TIDEGATE_STATE_DIR=/var/lib/tidegate \
    TIDEGATE_GATEWAY_HOST=0.0.0.0 \
    TIDEGATE_ADMIN=http://127.0.0.1:8081
# Torch and Triton compile kernels at run time and need a compiler; Debian's point release pins its version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 tidegate \
    && useradd --uid 10001 --gid tidegate --create-home tidegate \
    && install -d -o tidegate -g tidegate -m 700 /var/lib/tidegate /var/cache/tidegate \
    && python -m venv /opt/tidegate
WORKDIR /src

# Dependencies before sources, so that a code change does not reinstall them.
FROM base AS cpu-packages
COPY requirements/cpu.txt requirements/
RUN pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu \
      "$(grep '^torch==' requirements/cpu.txt)" \
    && pip install --no-cache-dir --no-deps -r requirements/cpu.txt

FROM base AS gpu-packages
COPY requirements/gpu.txt requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/gpu.txt

FROM scratch AS sources
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY policy policy
COPY store store
COPY gateway gateway
COPY serve serve
COPY sim sim
COPY tidegate tidegate

# The build backend compiles; outside of /src the installed package says whether it did.
FROM cpu-packages AS cpu-build
COPY --from=sources /src ./
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
WORKDIR /
RUN python -m store.compiled_modules

FROM gpu-packages AS gpu-build
COPY --from=sources /src ./
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
WORKDIR /
RUN python -m store.compiled_modules

FROM base AS runtime
WORKDIR /var/lib/tidegate
USER 10001:10001
VOLUME ["/var/lib/tidegate", "/var/cache/tidegate"]
EXPOSE 8080
# Large weights take minutes to fetch and to load; the admin port answers meanwhile.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['TIDEGATE_ADMIN'] + '/livez', timeout=4)"]
ENTRYPOINT ["tidegate"]
CMD ["run", "/etc/tidegate/deployment.yaml"]

FROM runtime AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-build /opt/tidegate /opt/tidegate

# Last, so that it is the default target.
FROM runtime AS cpu
COPY --from=cpu-build /opt/tidegate /opt/tidegate
