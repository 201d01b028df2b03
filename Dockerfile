# SGLang's official image with the plugin in it; the tag names the versions of both:
#   docker build --build-arg SGLANG=v0.5.23 -t sglang-gemma4:v0.5.23-0.1.0 .
#   docker run --gpus all --shm-size 8g -p 30000:30000 sglang-gemma4:v0.5.23-0.1.0 \
#       sglang serve --model-path google/gemma-4-E2B-it --host 0.0.0.0
ARG SGLANG=v0.5.23
FROM lmsysorg/sglang:${SGLANG}
COPY pyproject.toml README.md LICENSE /opt/sglang-gemma4-yoco/
COPY sglang_gemma4_yoco /opt/sglang-gemma4-yoco/sglang_gemma4_yoco
# SGLang is in the image; nothing else may be exchanged there.
RUN pip install --no-deps /opt/sglang-gemma4-yoco
