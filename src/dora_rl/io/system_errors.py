"""What the machine refuses (memory, a read-only or full disk, a right), told in one line.

Imports nothing heavy, so that the command line can use it. Anything else is a mistake of ours and
keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re

TOLD = {
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "choose another place, or change its rights",
    errno.EPERM: "choose another place, or change its rights",
    errno.ENOSPC: "make room, or choose another place",
    errno.EDQUOT: "make room, or choose another place",
    errno.EFBIG: "make room, or choose another place",
}

# How torch's allocator on a CPU and Python's threads say it.
NO_MEMORY = ("can't allocate memory", "can't start new thread")


def is_memory(error: BaseException) -> bool:
    """The system or a device had no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def number_of(error: BaseException) -> int | None:
    """The system's number; libraries that write for us (safetensors) have it in their text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(error))
    return int(found.group(1) or found.group(2)) if found else None


def system_line(error: BaseException) -> str | None:
    """One line, or None: this was not the machine."""
    if is_memory(error):
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        detail = f" ({first[:200]})" if first else ""
        return f"out of memory{detail}; end other programs, or use smaller sizes"
    number = number_of(error)
    if number not in TOLD:
        return None
    where = getattr(error, "filename", None)
    place = f"cannot use {where}" if where else "cannot write"
    return f"{place}: {os.strerror(number)}; {TOLD[number]}"
