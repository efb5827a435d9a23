# A worker of a Prefect pool that runs every flow of this project. Not built here: there was no
# engine to build it with. `make lint` runs hadolint on it, and tests/integration/test_image.py
# replays what it installs in an empty environment.
#
#   CPU:  docker build -t dflash-flows .
#   GPU:  docker build -t dflash-flows:cuda --build-arg CONSTRAINTS= \
#           --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .

ARG BASE=debian:trixie-slim

FROM ${BASE} AS builder
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml constraints.txt constraints-image.txt README.md LICENSE ./
COPY dflash_core dflash_core
COPY flows flows
COPY tasks tasks
COPY configs configs
# On GPUs pass CONSTRAINTS= so that pip takes the CUDA build of torch.
ARG CONSTRAINTS="-c constraints.txt"
# The words of CONSTRAINTS are options.
# hadolint ignore=SC2086
RUN /opt/venv/bin/pip install -c constraints-image.txt ${CONSTRAINTS} .

FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
# git lets deployments pull their code; tini hands signals on to the whole group, so that a stopped
# container lets torchrun save.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 git tini ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 flows
COPY --from=builder /opt/venv /opt/venv
WORKDIR /app
COPY --chown=flows:flows prefect.yaml ./
COPY --chown=flows:flows flows flows
COPY --chown=flows:flows configs configs
RUN mkdir runs && chown -R flows:flows /app
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PREFECT_RESULTS_DEFAULT_SERIALIZER=json \
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 \
    DO_NOT_TRACK=1 \
    MLFLOW_DISABLE_TELEMETRY=true
USER 10001
# Deployments say run.root: runs, which is this folder.
VOLUME /app/runs
# The worker answers on this port when it is started with --with-healthcheck.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["/usr/bin/tini", "-g", "--"]
CMD ["prefect", "worker", "start", "--pool", "dflash", "--type", "process", "--with-healthcheck"]
