"""Hostile programs that go for the kernel: its calls, privileges and own limits."""

from __future__ import annotations

from tests.unit.rewards.hostile_programs import Hostile

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
    "limit_of_init": refused("libc.prlimit(1, 0, (ctypes.c_ulong * 2)(1, 1), None)"),
    "limit_of_oneself_by_number": refused(
        "libc.prlimit(os.getpid(), 0, (ctypes.c_ulong * 2)(1, 1), None)"
    ),
    "priority_of_init": refused("libc.setpriority(0, 1, 19)"),
    "priority_of_all_of_the_user": refused("libc.setpriority(2, 0, 19)"),
    "processor_of_init": refused("libc.sched_setaffinity(1, 8, ctypes.byref(ctypes.c_ulong(1)))"),
    "descriptor_of_init": refused("libc.syscall(434, 1, 0)"),
    "signal_to_init": refused("libc.kill(1, 9)"),
    "signal_to_thread_of_init": refused("libc.syscall(number(234, 131), 1, 1, 9)"),
    "queued_signal_to_init": refused("libc.sigqueue(1, 10, 0)"),
    "madvise_of_init": refused("libc.syscall(440, 1, 0, 0, 0, 0)"),
    "compare_with_init": refused("libc.syscall(number(312, 272), os.getpid(), 1, 0, 0, 0)"),
    "child_of_init": refused("libc.syscall(number(56, 220), 0x8000 | 17, 0, 0, 0, 0)"),
    "user_fault_memory": refused("libc.syscall(number(323, 282), 0)"),
    "secret_memory": refused("libc.syscall(447, 0)"),
    "another_filter": refused("libc.prctl(22, 2, 0, 0, 0)"),
    "file_handles": refused("libc.syscall(number(303, 264), -100, b'/tmp', 0, 0, 0)"),
    "terminal_input": refused("libc.ioctl(0, 0x5412, b'x')"),
    "name_of_a_socket": Hostile(
        """
import socket
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for name in (lambda: one.bind(b"\\0run"), lambda: one.connect(b"\\0run"),
             # Whoever asks for credentials is given a name by the kernel.
             lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)):
    try:
        name()
        print("BREACH")
    except PermissionError:
        pass
one.send(b"x")
print("BREACH" if other.getsockname() or one.getsockname() else "nameless")
""",
        says="nameless",
    ),
    "asynchronous_io": refused("libc.syscall(number(206, 0), 1, ctypes.byref(ctypes.c_ulong()))"),
    "watching_files": refused("libc.inotify_init()"),
    "old_convention": Hostile(
        PRELUDE
        + """
import mmap
if os.uname().machine != "x86_64":
    os.kill(os.getpid(), 31)
# int 0x80, getpid of the 32-bit table, which no filter of ours knows.
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
page.write(bytes.fromhex("b814000000cd80c3"))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("BREACH" if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0 else "refused")
""",
        ("signal",),
    ),
    "memory_shared_without_a_file": Hostile(
        """
import mmap
held = []
while True:
    area = mmap.mmap(-1, 64 << 20)
    for place in range(0, len(area), 4096):
        area[place] = 1
    # Nothing of it is in the tables of any process now.
    area.madvise(mmap.MADV_DONTNEED)
    held.append(area)
    print("BREACH" if len(held) > 8 else "")
""",
        ("failed", "memory"),
    ),
    "memory_shared_by_dev_zero": Hostile(
        """
import mmap, os
fd = os.open("/dev/zero", os.O_RDWR)
print("BREACH", mmap.mmap(fd, 64 << 20))
""",
        ("failed",),
        says="FileNotFoundError",
    ),
    "huge_pages": refused("libc.syscall(number(9, 222), 0, 1 << 21, 3, 0x40022, -1, 0)"),
    "memory_in_pipes": Hostile(
        """
import fcntl, os
kept = 0
try:
    while True:
        read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
        os.set_blocking(write, False)
        kept += os.write(write, bytes(1 << 20))
except OSError:
    pass
print("BREACH" if kept > 64 << 20 else "bounded")
""",
        says="bounded",
    ),
    "memory_in_sockets": Hostile(
        """
import socket
kept, pairs = 0, []
try:
    while True:
        one, other = socket.socketpair()
        one.setblocking(False)
        pairs.append((one, other))
        try:
            while True:
                kept += one.send(bytes(65536))
        except BlockingIOError:
            pass
except OSError:
    pass
print("BREACH" if kept > 64 << 20 else "bounded")
""",
        says="bounded",
    ),
    "stop_everyone": Hostile(
        """
import os, signal
child = os.fork()
if child == 0:
    while True: pass
os.kill(child, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGSTOP)
""",
        ("time",),
    ),
    "orphans": Hostile(
        """
import os
for _ in range(200):
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
    except OSError:
        pass
print("buried")
""",
        says="buried",
    ),
    "timers": Hostile(
        PRELUDE
        + """
count = 0
timer = ctypes.c_int()
while libc.syscall(number(222, 107), 1, None, ctypes.byref(timer)) == 0 and count < 10000:
    count += 1
print("BREACH" if count >= 10000 else "bounded")
""",
        says="bounded",
    ),
    "link_of_its_input": Hostile(
        """
import os
os.unlink("/tmp/.stdin")
os.symlink("/usr/bin/python3", "/tmp/.stdin")
print(os.path.exists("/dev/stdin"))
"""
    ),
    "sleeps_past_its_time_in_a_child": Hostile(
        """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
os.wait()
""",
        ("time",),
    ),
}
