# SPDX-License-Identifier: Apache-2.0
"""How much of a GPU's memory is in use, by whatever program."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

# Ray's copy: torch's own question wants nvidia-ml-py, which nothing here installs, or a CUDA context.
from ray._private.thirdparty import pynvml

log = logging.getLogger(__name__)
GIB = 2**30


class InUse(NamedTuple):
    """What programs hold of a GPU.

    Attributes:
        number: nvidia-smi's.
        gib: of all programs together.
    """

    number: int
    gib: float


def gpu_memory_in_use(uuids: Sequence[str]) -> list[InUse]:
    """What is in use of GPUs, without a CUDA context; those of which NVML does not know it are left out.

    Args:
        uuids: as in torch's properties, without "GPU-".
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("nobody knows how much of the GPUs' memory is in use: NVML says %s", error)
        return []
    try:
        return [known for known in map(_in_use, uuids) if known is not None]
    finally:
        pynvml.nvmlShutdown()


def _in_use(uuid: str) -> InUse | None:
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        used = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used  # not what the driver reserves
        return InUse(pynvml.nvmlDeviceGetIndex(gpu), used / GIB)
    except pynvml.NVMLError as error:  # a part of a GPU (MIG) has another kind of name
        log.debug("nobody knows how much of GPU %s's memory is in use: NVML says %s", uuid, error)
        return None
