# An origin: docker build -f deploy/origin.Dockerfile -t tailrace-origin .
# PIP_ARGS is passed on to pip: name PyTorch's CPU index in it to leave CUDA out.
ARG PYTHON=3.12-slim

FROM python:${PYTHON} AS build
ARG PIP_ARGS=
COPY . /src
RUN python -m venv /opt/tailrace \
    && /opt/tailrace/bin/pip install --no-cache-dir ${PIP_ARGS} -c /src/constraints.txt '/src[torch,postgres]'

FROM python:${PYTHON}
COPY --from=build /opt/tailrace /opt/tailrace
RUN useradd --system --uid 10001 --home-dir /var/lib/tailrace tailrace \
    && install -d -o tailrace -g tailrace -m 0700 /var/lib/tailrace
USER 10001
WORKDIR /var/lib/tailrace
ENV PATH=/opt/tailrace/bin:$PATH \
    TAILRACE_ORIGIN_LINK=0.0.0.0:8470 \
    TAILRACE_ORIGIN_DATA=/var/lib/tailrace
EXPOSE 8470
VOLUME /var/lib/tailrace
STOPSIGNAL SIGTERM
ENTRYPOINT ["tailrace"]
CMD ["origin"]
