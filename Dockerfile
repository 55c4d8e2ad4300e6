# docker build -t transduce .                          CPU
# docker build -t transduce --build-arg TORCH=cuda .   GPU: the CUDA packages of PyTorch are several gigabytes
# docker run --rm -it -v "$PWD:/data" transduce train pairs.tsv
# docker run --rm -p 8000:8000 -v "$PWD:/data" transduce serve runs/demo --host 0.0.0.0 --api-key-file keys.txt
FROM python:3.11-slim

ARG TORCH=cpu
# A C compiler enables the native CPU kernels.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/transduce
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN if [ "$TORCH" = cpu ]; then pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu; fi \
    && pip install --no-cache-dir '.[image,sound,parquet,hub,serve,zstd]'

RUN useradd --create-home user && mkdir /data && chown user /data
USER user
WORKDIR /data
EXPOSE 8000
ENTRYPOINT ["transduce"]
CMD ["--help"]
