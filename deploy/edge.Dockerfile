# An edge, without torch: docker build -f deploy/edge.Dockerfile -t tailrace-edge .
# PIP_ARGS is passed on to pip, for example to name a mirror.
ARG PYTHON=3.12-slim

FROM python:${PYTHON} AS build
ARG PIP_ARGS=
COPY . /src
RUN python -m venv /opt/tailrace \
    && /opt/tailrace/bin/pip install --no-cache-dir ${PIP_ARGS} -c /src/constraints.txt /src

FROM python:${PYTHON}
COPY --from=build /opt/tailrace /opt/tailrace
RUN useradd --system --uid 10001 --home-dir /var/lib/tailrace tailrace \
    && install -d -o tailrace -g tailrace -m 0700 /var/lib/tailrace /keys
USER 10001
WORKDIR /var/lib/tailrace
ENV PATH=/opt/tailrace/bin:$PATH \
    TAILRACE_EDGE_HTTP=0.0.0.0:8080 \
    TAILRACE_EDGE_API_KEYS=/keys/api-keys.json
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["tailrace"]
CMD ["edge"]
