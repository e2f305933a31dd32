"""The few system calls that Python does not offer: namespaces, mounts, capabilities.

Only the standard library, because the zygote runs without any package. Nothing here decides what
to isolate. Invariant: every call that fails raises `OSError` with the name of the call.
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_PIDFD = 0x00001000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
PR_SET_CHILD_SUBREAPER = 36
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION_3 = 0x20080522

AT_FDCWD, AT_RECURSIVE = -100, 0x8000

# Numbers that differ between the two machines; those from 424 on are the same everywhere.
NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91},
}
MOUNT_SETATTR, CLOSE_RANGE = 442, 436

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _call(number: int, name: str, *arguments: object) -> int:
    return _checked(libc.syscall(ctypes.c_long(number), *arguments), name)


def number_of(name: str) -> int:
    machine = os.uname().machine
    if machine not in NUMBERS:
        raise OSError(0, f"no system call table for {machine}")
    return NUMBERS[machine][name]


def unshare(flags: int) -> None:
    _checked(libc.unshare(ctypes.c_int(flags)), "unshare")


def clone(flags: int) -> tuple[int, int]:
    """`fork`, with new namespaces for the child; its pid, and a descriptor that is its own even if
    it has ended before we look. The caller must have one thread only."""
    zero, pidfd = ctypes.c_ulong(0), ctypes.c_int(-1)
    word = ctypes.c_ulong(flags | CLONE_PIDFD | signal.SIGCHLD)
    pid = _call(number_of("clone"), "clone", word, zero, ctypes.byref(pidfd), zero, zero)
    if pid == 0:
        # What `os.fork` does in the child: locks, thread state, the hooks of `random`.
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid, pidfd.value


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _checked(result, f"mount {target}")


def unmount(target: str) -> None:
    _checked(libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def restrict_mount(target: str, attributes: int) -> None:
    """Set attributes on a mount and all below it, and keep those that it has."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    _call(
        MOUNT_SETATTR,
        f"mount_setattr {target}",
        ctypes.c_int(AT_FDCWD),
        target.encode(),
        ctypes.c_uint(AT_RECURSIVE),
        wanted,
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )


def pivot_root(new: str, old: str) -> None:
    _call(number_of("pivot_root"), "pivot_root", new.encode(), old.encode())


def prctl(option: int, value: int, more: int = 0) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, more, 0, 0)]
    _checked(libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")


def drop_capabilities() -> None:
    """None now; and with no_new_privs and a user other than root, none after an `execve`."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _call(number_of("capset"), "capset", header, nothing)


def close_from(first: int) -> None:
    _call(
        CLOSE_RANGE,
        "close_range",
        ctypes.c_uint(first),
        ctypes.c_uint(0xFFFFFFFF),
        ctypes.c_uint(0),
    )
