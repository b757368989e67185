"""Which GPUs NVIDIA's driver shows this process, asked before JAX starts. Those that CUDA_VISIBLE_DEVICES or a scheduler hides
are not among them.

No memory is taken on a GPU: the driver's library is set up, as JAX will do anyway, but no context is made.
"""

from __future__ import annotations

import ctypes
import uuid

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100


def visible_gpus() -> list[str] | None:
    """UUIDs as nvidia-smi prints them, in CUDA's order; empty without a driver or a GPU; None: the driver fails otherwise."""
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
    # The newer one tells parts of a GPU (MIG) apart; drivers before CUDA 11.4 lack it.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    gpus = []
    for ordinal in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or get_uuid(ctypes.byref(found), device):
            return None
        gpus.append(f"GPU-{uuid.UUID(bytes=bytes(found))}")
    return gpus
