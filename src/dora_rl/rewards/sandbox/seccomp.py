"""The system call filter of a sandboxed program, as a classic BPF program.

What a program has no business with is refused with EPERM: other networks, namespaces, mounts,
tracing, keys, kernel modules, clocks, identities, memory outside its limits. Calls newer than the
table are answered ENOSYS, as by an older kernel. Another machine's calling convention kills.
Only the standard library. Invariant: once installed, the filter holds for all descendants.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from dora_rl.rewards.sandbox import kernel

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
RET_KILL, RET_ERRNO, RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_SET, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBER_MAX = 462
CLONE3 = 435
NEW_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags that clone takes
AF_UNIX, TIOCSTI, TIOCLINUX = 1, 0x5412, 0x541C

# name: (x86_64, aarch64); None where the machine has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "sysfs": (139, None),
    "ustat": (136, None),
    "_sysctl": (156, None),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setgroups": (116, 159),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    # Memory that no limit of the process counts.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "mlock": (149, 228),
    "mlockall": (151, 230),
    "mlock2": (325, 284),
    "vmsplice": (278, 75),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "memfd_secret": (447, 447),
    "process_mrelease": (448, 448),
    "set_mempolicy_home_node": (450, 450),
    "statmount": (457, 457),
    "listmount": (458, 458),
}
# Calls whose first (clone, socketpair) or second (ioctl) argument decides.
CLONE, SOCKETPAIR, IOCTL = (56, 220), (53, 199), (16, 29)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _instruction(RETURN, RET_ERRNO | number)


def _argument(index: int) -> bytes:
    """Load the low half of an argument; the high half of these is ignored by the kernel too."""
    return _instruction(LOAD, OFFSET_ARGUMENTS + 8 * index)


def program(machine: str) -> bytes:
    """The filter for one machine.

    arch is ours?           no -> kill
    number > NUMBER_MAX?    yes -> ENOSYS (this also covers x32, which sets a high bit)
    number is denied?       yes -> EPERM
    clone, socketpair, ioctl: look at the argument
    allow
    """
    column = list(AUDIT_ARCH).index(machine)
    allow, deny = _instruction(RETURN, RET_ALLOW), _refuse(errno.EPERM)
    parts = [
        _instruction(LOAD, OFFSET_ARCH),
        _instruction(JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _instruction(RETURN, RET_KILL),
        _instruction(LOAD, OFFSET_NUMBER),
        _instruction(JUMP_GREATER, NUMBER_MAX, 0, 1),
        _refuse(errno.ENOSYS),
        # The C library falls back to clone, whose flags a filter can read.
        _instruction(JUMP_EQUAL, CLONE3, 0, 1),
        _refuse(errno.ENOSYS),
        _instruction(JUMP_EQUAL, CLONE[column], 0, 4),
        *(_argument(0), _instruction(JUMP_SET, NEW_NAMESPACES, 0, 1), deny, allow),
        _instruction(JUMP_EQUAL, SOCKETPAIR[column], 0, 4),
        *(_argument(0), _instruction(JUMP_EQUAL, AF_UNIX, 1, 0), deny, allow),
        _instruction(JUMP_EQUAL, IOCTL[column], 0, 5),
        *(_argument(1), _instruction(JUMP_EQUAL, TIOCSTI, 1, 0)),
        *(_instruction(JUMP_EQUAL, TIOCLINUX, 0, 1), deny, allow),
    ]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            parts += [_instruction(JUMP_EQUAL, numbers[column] or 0, 0, 1), deny]
    return b"".join([*parts, allow])


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
