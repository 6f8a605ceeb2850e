# An origin that runs models, with torch: docker build -f deploy/origin.Dockerfile -t tailrace-origin .
# PIP_ARGS is passed on to pip: name PyTorch's CPU index in it to leave CUDA out, or the index of
# the CUDA version that your driver supports. EXTRAS=gpu,postgres is for GPUs.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG PIP_ARGS=
ARG EXTRAS=torch,postgres
COPY . /src
# hadolint ignore=SC2086
RUN python -m venv /opt/tailrace \
    && /opt/tailrace/bin/pip install --no-cache-dir ${PIP_ARGS} -c /src/constraints.txt "/src[${EXTRAS}]"

FROM python:${PYTHON}
# On a GPU, Triton compiles its driver module when it is first used: with gcc and Python.h. The last
# line fails the build of the image where one of them is missing.
# hadolint ignore=DL3008,SC2046
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && gcc -fsyntax-only -x c $(python3-config --includes) -include Python.h /dev/null
COPY --from=build /opt/tailrace /opt/tailrace
RUN useradd --system --uid 10001 --home-dir /var/lib/tailrace tailrace \
    && install -d -o tailrace -g tailrace -m 0700 /var/lib/tailrace
USER 10001
WORKDIR /var/lib/tailrace
ENV PATH=/opt/tailrace/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TAILRACE_ORIGIN_LINK=0.0.0.0:8470 \
    TAILRACE_ORIGIN_DATA=/var/lib/tailrace
EXPOSE 8470
VOLUME /var/lib/tailrace
STOPSIGNAL SIGTERM
ENTRYPOINT ["tailrace"]
CMD ["origin"]
