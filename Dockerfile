# An SGLang image that contains the plugin. The tag names the versions of both:
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) -t sglang-gemma4:v0.5.23-0.1.0 .
#   docker run --gpus all --shm-size 8g -p 30000:30000 sglang-gemma4:v0.5.23-0.1.0 \
#       sglang serve --model-path google/gemma-4-E4B-it --host 0.0.0.0
# BASE may be any SGLang image: a smaller one (lmsysorg/sglang:v0.5.23-runtime), one from another
# registry, or one by digest (lmsysorg/sglang@sha256:...).
ARG BASE=lmsysorg/sglang:v0.5.23
FROM ${BASE}
ARG COMMIT=unknown
LABEL org.opencontainers.image.revision=${COMMIT}
COPY . /opt/sglang-gemma4-yoco/
# This needs no network, because SGLang's image contains SGLang and setuptools. It replaces no other
# package. The second command fails if this Python is not SGLang's.
RUN SGLANG_GEMMA4_YOCO_COMMIT=${COMMIT} python3 -m pip install --no-cache-dir --no-index --no-deps \
        --no-build-isolation /opt/sglang-gemma4-yoco \
    && python3 -c "from importlib.metadata import entry_points, version; version('sglang'); \
entry_points(group='sglang.srt.plugins')['gemma4_yoco'].load()"
