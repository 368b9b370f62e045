# SPDX-License-Identifier: Apache-2.0
# The image of flux2-klein and, by its labels, of flux2-dev. Target `cpu`: the server and what it needs, nothing else.
#
#   docker build --target cpu -t flux2-klein:cpu .        (packager build does the same, and more)
#
# Neither stage needs BuildKit. The base images are arguments so that they can be pinned by digest
# (manifest.lock holds the digests) or made by hand where no registry can be reached.
ARG BUILDER_IMAGE=rust:1.95-bookworm
ARG BASE_IMAGE=debian:bookworm-slim

# ---- build: the server's binary ------------------------------------------------------------------
FROM ${BUILDER_IMAGE} AS build
WORKDIR /src
# build-ca.crt, if the context has one: the certificates of a network that inspects its traffic. It
# stays in this stage.
COPY Cargo.toml Cargo.lock build-ca.cr[t] ./
COPY code/Cargo.toml code/
COPY hub/Cargo.toml hub/
COPY server/Cargo.toml server/
COPY packager/Cargo.toml packager/
ARG PROFILE=dist
# The dependencies alone, over empty sources: this layer is kept until a manifest changes.
RUN set -e; \
    for crate in code hub server packager; do mkdir -p $crate/src; echo 'fn main() {}' > $crate/src/main.rs; : > $crate/src/lib.rs; done; \
    mkdir code/benches; \
    for bench in $(sed -n '/^\[\[bench\]\]/,/^name/s/^name = "\(.*\)"/\1/p' code/Cargo.toml); do echo 'fn main() {}' > code/benches/$bench.rs; done; \
    if [ -f build-ca.crt ]; then export CARGO_HTTP_CAINFO=/src/build-ca.crt; fi; \
    cargo build --locked --profile $PROFILE -p server; \
    rm -rf code/src code/benches hub/src server/src
COPY code code
COPY hub hub
COPY server server
# Sources have the fixed time of the context; cargo must still see them as newer than the empty ones.
RUN set -e; \
    find code hub server -name '*.rs' -exec touch {} +; \
    if [ -f build-ca.crt ]; then export CARGO_HTTP_CAINFO=/src/build-ca.crt; fi; \
    cargo build --locked --profile $PROFILE -p server; \
    mkdir -p /out/usr/local/bin; \
    find target -maxdepth 2 -type f -name flux2-server -exec install -m 755 {} /out/usr/local/bin/flux2-server \;
COPY docker/entrypoint.sh docker/healthcheck.sh /out/usr/local/bin/
RUN chmod 755 /out/usr/local/bin/*

# ---- cpu: serves on the host's processor ---------------------------------------------------------
FROM ${BASE_IMAGE} AS cpu
# The user has fixed ids, and every directory that is written to is open: any --user works.
RUN set -e; \
    echo 'tt:x:1000:1000:tt:/home/tt:/bin/sh' >> /etc/passwd; \
    echo 'tt:x:1000:' >> /etc/group; \
    mkdir -p /home/tt/work/logs /cache /hf /weight-cache /tensor-cache; \
    chmod 1777 /home/tt /home/tt/work /home/tt/work/logs /cache /hf /weight-cache /tensor-cache
COPY --from=build /out/ /
COPY code /opt/flux2/code
ARG IMAGE_TITLE=flux2-klein
ARG IMAGE_DESCRIPTION="FLUX.2 [klein] 4B served over HTTP"
ARG IMAGE_SOURCE=https://huggingface.co/flux2-tt/flux2-klein-p100a
LABEL org.opencontainers.image.title="$IMAGE_TITLE" \
      org.opencontainers.image.description="$IMAGE_DESCRIPTION" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="$IMAGE_SOURCE"
ENV HOME=/home/tt USER=tt LOGNAME=tt \
    HF_HOME=/hf TT_METAL_CACHE=/cache TT_DIT_CACHE_DIR=/weight-cache
USER tt
WORKDIR /home/tt/work
EXPOSE 20000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["healthcheck.sh"]
ENTRYPOINT ["entrypoint.sh"]
CMD ["explain"]
