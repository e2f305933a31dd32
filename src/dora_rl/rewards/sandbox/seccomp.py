"""The system call filter of a sandboxed program, as a classic BPF program.

An allow-list: what is not in `calls` is refused with EPERM, or answered ENOSYS where a C library
has another way when a call is too new for its kernel. Calls that could touch another process are
looked into: limits, priorities and processors are one's own, and no signal goes to the run's init.
Another machine's calling convention kills. Only the standard library.
Invariant: once installed, the filter holds for all descendants.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from dora_rl.rewards.sandbox import calls, kernel

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
RET_KILL, RET_ERRNO, RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_AT_LEAST, JUMP_SET, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
JUMP = 0x05
JUMPS = (JUMP_EQUAL, JUMP_GREATER, JUMP_AT_LEAST, JUMP_SET)
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# From here on the C library tries an older call; x32, which sets a high bit, is here as well.
NEW_CALLS = 424

# CLONE_NEW*, and what makes another the parent or the tracer of the child.
CLONE_REFUSED = 0x7E020000 | 0x00008000 | 0x00002000 | 0x00800000
AF_UNIX, INIT, MYSELF = 1, 1, 0
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Death signal, dumpable, name, capabilities asked, subreaper, no_new_privs, names of mappings.
PRCTLS = (1, 2, 3, 4, 15, 16, 23, 36, 37, 38, 39, 0x53564D41)
# Descriptors, their flags, locks of records, the size of a pipe; no owners and signals of files, no
# leases, no seals, no watching of directories.
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034)
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _instruction(RETURN, RET_ERRNO | number)


ALLOW, DENY = _instruction(RETURN, RET_ALLOW), _refuse(errno.EPERM)


def _argument(index: int) -> bytes:
    """Load the low half of an argument; the high half of these is ignored by the kernel too."""
    return _instruction(LOAD, OFFSET_ARGUMENTS + 8 * index)


def _only(index: int, values: Sequence[int], otherwise: bytes) -> list[bytes]:
    """Allow if the argument is one of `values`."""
    tests = [
        _instruction(JUMP_EQUAL, value, len(values) - place) for place, value in enumerate(values)
    ]
    return [_argument(index), *tests, otherwise, ALLOW]


def _looked_into() -> dict[str, list[bytes]]:
    """What decides about a call of `calls.CHECKED`; every way through ends in a return."""
    not_init = [_argument(0), _instruction(JUMP_EQUAL, INIT, 0, 1), DENY, ALLOW]
    mine = _only(0, [MYSELF], DENY)
    return {
        "clone": [_argument(0), _instruction(JUMP_SET, CLONE_REFUSED, 0, 1), DENY, ALLOW],
        "socketpair": _only(0, [AF_UNIX], DENY),
        "ioctl": _only(1, IOCTLS, _refuse(errno.ENOTTY)),
        "prctl": _only(0, PRCTLS, _refuse(errno.EINVAL)),
        # Of a process, not of a group or a user: init is one of the user's processes.
        "setpriority": [_argument(0), _instruction(JUMP_EQUAL, 0, 1), DENY, *_only(1, [0], DENY)],
        # Of shared memory without a file, what is unmapped in part stays and is in no table; huge
        # pages are in none either. Files in /dev/shm are shared memory with a size.
        "mmap": [
            _argument(3),
            _instruction(JUMP_SET, MAP_HUGETLB, 3, 0),
            _instruction(JUMP_SET, MAP_ANONYMOUS, 0, 1),
            _instruction(JUMP_SET, MAP_SHARED, 1, 0),
            ALLOW,
            DENY,
        ],
        "fcntl": _only(1, FCNTLS, DENY),
        "prlimit64": mine,
        "sched_setaffinity": mine,
        **dict.fromkeys(("kill", "tkill", "tgkill", "pidfd_open"), not_init),
        **dict.fromkeys(("rt_sigqueueinfo", "rt_tgsigqueueinfo"), not_init),
    }


def segments(machine: str) -> list[tuple[int, list[bytes]]]:
    """What is done from each number on, until the next entry; the first entry is 0."""
    plain = (calls.numbers(table, machine).values() for table in calls.PLAIN)
    done = {number: [ALLOW] for numbers in plain for number in numbers}
    looked_into, checked = _looked_into(), calls.numbers(calls.CHECKED, machine)
    done |= {number: looked_into[name] for name, number in checked.items()}
    made: list[tuple[int, list[bytes]]] = []
    for number in range(max(*done, NEW_CALLS) + 2):
        action = done.get(number, [DENY] if number < NEW_CALLS else [_refuse(errno.ENOSYS)])
        if not made or made[-1][1] != action:
            made.append((number, action))
    return made


def _search(found: Sequence[tuple[int, list[bytes]]]) -> list[bytes]:
    """A binary search: a filter that is installed is walked once for every call there is,
    and what is always allowed costs nothing afterwards."""
    if len(found) == 1:
        return found[0][1]
    middle = len(found) // 2
    lower, upper = _search(found[:middle]), _search(found[middle:])
    # A test reaches 255 instructions far, a jump any distance.
    over = [_instruction(JUMP, len(lower))]
    return [_instruction(JUMP_AT_LEAST, found[middle][0], 0, 1), *over, *lower, *upper]


def program(machine: str) -> bytes:
    """The filter for one machine: another convention kills, then the number decides."""
    parts = [
        _instruction(LOAD, OFFSET_ARCH),
        _instruction(JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _instruction(RETURN, RET_KILL),
        _instruction(LOAD, OFFSET_NUMBER),
        *_search(segments(machine)),
    ]
    return b"".join(parts)


class Filter:
    """Made once in the zygote; installing it in a run is two system calls."""

    def __init__(self) -> None:
        code = program(os.uname().machine)
        self._code = ctypes.create_string_buffer(code, len(code))
        # struct sock_fprog: a 16-bit count, padding, a pointer.
        header = struct.pack("@HP", len(code) // 8, ctypes.addressof(self._code))
        self._header = ctypes.create_string_buffer(header)

    def install(self) -> None:
        """From here on, for this process and all it starts."""
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(self._header))
