# The images of both environments, each a target; the dev container takes their base.
# docker build --target train -t doubleflow .         the environment of `make train`
# docker build --target vllm  -t doubleflow:vllm .    the one with vLLM-Omni on a CPU
# PyPI's torch is the CUDA build; --build-arg EXTRA_INDEX=https://download.pytorch.org/whl/cpu takes the CPU build.
FROM python:3.11-slim-bookworm AS base
RUN apt-get update && apt-get install --yes --no-install-recommends git make g++ libgl1 libglib2.0-0 libsndfile1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home doubleflow
WORKDIR /home/doubleflow/project
RUN chown doubleflow .
USER doubleflow
ARG EXTRA_INDEX=
ENV PIP_EXTRA_INDEX_URL=${EXTRA_INDEX} PIP_NO_CACHE_DIR=1
COPY --chown=doubleflow . .

FROM base AS train
RUN make .venv/.dev
CMD ["make", "train"]

FROM base AS vllm
RUN make .venv-vllm/.dev
CMD [".venv-vllm/bin/python", "-m", "flows.train", "--help"]
