# The base install, without torch: docker build -f deploy/edge.Dockerfile -t tailrace-edge .
# It runs an edge, or with the command `origin` an origin in front of an upstream server.
# PIP_ARGS is passed on to pip, for example to name a mirror.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG PIP_ARGS=
COPY . /src
# hadolint ignore=SC2086
RUN python -m venv /opt/tailrace \
    && /opt/tailrace/bin/pip install --no-cache-dir ${PIP_ARGS} -c /src/constraints.txt /src

FROM python:${PYTHON}
COPY --from=build /opt/tailrace /opt/tailrace
RUN useradd --system --uid 10001 --home-dir /var/lib/tailrace tailrace \
    && install -d -o tailrace -g tailrace -m 0700 /var/lib/tailrace /keys /tls
USER 10001
WORKDIR /var/lib/tailrace
# The variable is the path of a file of hashes.
# hadolint ignore=DL3064
ENV PATH=/opt/tailrace/bin:$PATH \
    TAILRACE_EDGE_API_KEYS=/keys/api-keys.json
# Clients find HTTP/3 at the port that the edge itself listens on: publish 443 as 443.
EXPOSE 443/tcp 443/udp
STOPSIGNAL SIGTERM
ENTRYPOINT ["tailrace"]
CMD ["edge", "--https", "0.0.0.0:443", "--certificate", "/tls/tls.crt", "--key", "/tls/tls.key"]
