# The coordinator of a federation: `polysite deploy ...`, on the CPU. Build it in the root of the source:
#   docker build -f docker/coordinator.Dockerfile -t polysite-coordinator .
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/polysite
COPY constraints.txt hospital.lock ./
RUN pip install torch -c constraints.txt \
    && pip install --require-hashes --no-deps -r hospital.lock
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-deps . \
    && useradd --create-home --uid 10001 polysite \
    && mkdir /work \
    && chown polysite /work

USER 10001
WORKDIR /work
VOLUME /work
# the port in server.toml
EXPOSE 9443
ENTRYPOINT ["polysite"]
CMD ["deploy", "--help"]
