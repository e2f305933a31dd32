"""Make glibc keep freed memory, so that large tensors are not mapped and zeroed again each time.

By default glibc returns every block above a threshold to the kernel, and a training step on the
CPU then spends a quarter of its time in page faults. Never fails: elsewhere it does nothing.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@cache
def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process, once. True if it took them."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # 32 MiB is the largest mmap threshold glibc accepts.
    settings = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(kind, value) == 1 for kind, value in settings)
