# A hospital in a federation: `polysite site ...`. No port is exposed: the site only connects out. Build it in the root of
# the source; for a GPU name a build of torch: --build-arg TORCH="torch==... --index-url ..."
#   docker build -f docker/site.Dockerfile -t polysite-site .
FROM python:3.11-slim-bookworm

ARG TORCH="torch -c constraints.txt"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/polysite
COPY constraints.txt hospital.lock ./
# TORCH holds several words, its version included
# hadolint ignore=SC2086,DL3013
RUN pip install ${TORCH} \
    && pip install --require-hashes --no-deps -r hospital.lock
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-deps . \
    && useradd --create-home --uid 10001 polysite \
    && mkdir /site /scans \
    && chown polysite /site

USER 10001
WORKDIR /site
VOLUME /site
ENTRYPOINT ["polysite", "site"]
CMD ["run", "/site"]
