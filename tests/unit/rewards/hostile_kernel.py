"""Hostile programs that go for the kernel: its calls, privileges and own limits."""

from __future__ import annotations

from hostile_programs import Hostile

PRELUDE = """
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)


def number(on_x86, on_arm):
    return on_x86 if os.uname().machine == "x86_64" else on_arm
"""


def refused(call: str) -> Hostile:
    """A call of the C library that must fail."""
    code = f"{PRELUDE}\nprint('BREACH' if {call} >= 0 else 'refused')"
    return Hostile(code, says="refused")


PROGRAMS: dict[str, Hostile] = {
    "network_raw_syscall": refused("libc.syscall(number(41, 198), 2, 1, 0)"),
    "ptrace_parent": refused("libc.ptrace(16, os.getppid(), 0, 0)"),
    "ptrace_me": refused("libc.ptrace(0, 0, 0, 0)"),
    "read_memory_of_init": Hostile(
        PRELUDE
        + """
buffer = ctypes.create_string_buffer(64)
class Iov(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
mine = Iov(ctypes.addressof(buffer), 64)
got = libc.process_vm_readv(1, ctypes.byref(mine), 1, ctypes.byref(mine), 1, 0)
print("BREACH" if got >= 0 else "refused")
""",
        says="refused",
    ),
    "mount_tmpfs": refused("libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'')"),
    "mount_writable": refused("libc.mount(b'none', b'/usr', b'', 32 | 4096, b'')"),
    "unmount": refused("libc.umount2(b'/tmp', 2)"),
    "new_user_namespace": refused("libc.unshare(0x10000000)"),
    "clone_user_namespace": refused("libc.syscall(number(56, 220), 0x10000000 | 17, 0, 0, 0, 0)"),
    "join_namespace": refused("libc.setns(0, 0)"),
    "setuid_root": Hostile(
        """
import os
os.setuid(0)
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "setuid_binary": Hostile(
        """
import os, shutil
shutil.copy('/bin/sh', '/tmp/sh')
os.chmod('/tmp/sh', 0o4755)
status = os.system('/tmp/sh -p -c "id -u" ; su -c id root < /dev/null 2>/dev/null')
print('BREACH' if os.geteuid() == 0 else 'same user')
""",
        says="same user",
    ),
    "capabilities": Hostile(
        PRELUDE
        + """
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()
number = number(125, 90)
assert libc.syscall(number, header, data) == 0
print("BREACH" if any(data) else "none")
""",
        says="none",
    ),
    "make_device": Hostile(
        """
import os
os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0))
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "kernel_keyring": refused("libc.syscall(number(248, 217), b'user', b'x', b'y', 1, -3)"),
    "bpf": refused("libc.syscall(number(321, 280), 0, 0, 0)"),
    "io_uring": refused("libc.syscall(425, 1, ctypes.create_string_buffer(256))"),
    "perf_events": refused(
        "libc.syscall(number(298, 241), ctypes.create_string_buffer(128), 0, -1, -1, 0)"
    ),
    "unknown_syscall": Hostile(
        PRELUDE
        + """
result = libc.syscall(900)
print("BREACH" if result >= 0 else ctypes.get_errno())
""",
        says="38",
    ),
    "sysctl": Hostile(
        """
open("/proc/sys/kernel/core_pattern", "w").write("|/tmp/x")
print("BREACH")
""",
        ("failed",),
        says="FileNotFoundError",
    ),
    "host_name": Hostile(
        """
import socket
socket.sethostname("breach")
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "set_clock": Hostile(
        """
import time
time.clock_settime(time.CLOCK_REALTIME, 0)
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "system_v_memory": refused("libc.shmget(7777, 4096, 0o1666)"),
    "posix_queue": refused("libc.mq_open(b'/breach', 0o102, 0o600, 0)"),
    "raise_limits": Hostile(
        """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
    try:
        resource.setrlimit(kind, (-1, -1))
        print("BREACH")
    except (OSError, ValueError):
        pass
"""
    ),
    "real_time_priority": Hostile(
        """
import os
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "crash": Hostile(
        """
import ctypes
ctypes.string_at(1)
""",
        ("signal",),
    ),
    "deep_recursion": Hostile(
        """
import sys
sys.setrecursionlimit(1 << 30)
class A:
    def __repr__(self):
        return repr(self)
repr(A())
""",
        ("signal", "failed", "memory", "time", "cpu"),
    ),
    "exit_in_thread": Hostile(
        """
import os, threading
threading.Thread(target=os._exit, args=(3,)).start()
import time
time.sleep(60)
""",
        ("failed",),
    ),
    "closes_everything": Hostile(
        """
import os
os.closerange(0, 1000)
while True:
    pass
""",
        ("time", "cpu"),
    ),
    "replaces_itself": Hostile(
        """
import os
os.execv("/bin/sh", ["sh", "-c", "while :; do :; done"])
""",
        ("time", "cpu"),
    ),
    "kernel_log": refused("libc.klogctl(3, ctypes.create_string_buffer(64), 64)"),
}
