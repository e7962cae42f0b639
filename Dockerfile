# moejax for NVIDIA GPUs: JAX's wheels bring CUDA, so the image needs the driver of the host alone.
#
#   docker build -t moejax .
#   docker run --gpus all -v "$PWD/runs:/home/moejax/runs" moejax train --config tiny
FROM python:3.13-slim-bookworm

# g++ compiles the CPU exchange (moejax/comm/cpu/exchange.cc) when it is first used. Runs and caches
# belong to a user who is not root: 1000 is the first user of most hosts, who then owns what a run
# writes to a mounted folder.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 moejax

WORKDIR /opt/moejax
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs ./configs
COPY moejax ./moejax
RUN pip install --no-cache-dir '.[cuda13,data,hf]' --constraint constraints.txt

# By number, so that a cluster may check that it is not root.
USER 1000
WORKDIR /home/moejax
ENTRYPOINT ["moejax"]
CMD ["--help"]
