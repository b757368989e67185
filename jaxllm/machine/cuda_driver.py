"""GPUs that NVIDIA's driver shows to this process, asked before JAX starts. GPUs hidden by CUDA_VISIBLE_DEVICES or by a
scheduler are not among them.

This takes no memory on a GPU: it initializes the driver's library, as JAX will do anyway, but creates no context.
"""

from __future__ import annotations

import ctypes
import uuid

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100


def visible_gpus() -> list[str] | None:
    """UUIDs as nvidia-smi prints them, in CUDA's order. Empty without a driver or a GPU; None if the driver fails in another
    way.
    """
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    count, device, found = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    status = cuda.cuInit(0)
    if status == NO_DEVICE:
        return []
    if status or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return None
    # The newer function distinguishes parts of a GPU (MIG); drivers before CUDA 11.4 do not have it.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    gpus = []
    for ordinal in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or get_uuid(ctypes.byref(found), device):
            return None
        gpus.append(f"GPU-{uuid.UUID(bytes=bytes(found))}")
    return gpus
