# pyringar on the CPU: `docker build -t pyringar .`, then
# `docker run --rm pyringar train lenet`. The image has no compiler: the engine is in the wheel.

FROM python:3.13-slim AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir build
WORKDIR /source
COPY . .
RUN PYRINGAR_PREBUILD=1 python -m build --wheel --outdir /wheels .

FROM python:3.13-slim
# The CPU's torch: PyPI's brings 3 GB of CUDA libraries.
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
RUN useradd --create-home ringar
USER ringar
WORKDIR /home/ringar
ENTRYPOINT ["pyringar"]
CMD ["info"]
