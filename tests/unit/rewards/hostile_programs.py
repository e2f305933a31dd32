"""Hostile programs: what each tries, how its run must end, what it must not have printed.

A program prints BREACH where it got through. `end` lists the ends that are a proper report. The
placeholders: @SECRET@ is a readable file of the user, @OUTSIDE@ a directory the user can write,
@PORT@ a server that listens on the machine's loopback, @PID@ the process that owns the sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hostile:
    code: str
    ends: tuple[str, ...] = ("ok",)
    says: str = ""  # what stdout or stderr must hold


PROGRAMS: dict[str, Hostile] = {
    "network_connect": Hostile(
        """
import socket
socket.create_connection(("127.0.0.1", @PORT@), 1)
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "network_udp": Hostile(
        """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.sendto(b"x", ("127.0.0.1", @PORT@))
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "unix_socket_of_host": Hostile(
        """
import socket
s = socket.socket(socket.AF_UNIX)
s.connect("/run/dbus/system_bus_socket")
print("BREACH")
""",
        ("failed",),
    ),
    "fork_bomb": Hostile(
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        ("time", "cpu"),
    ),
    "thread_bomb": Hostile(
        """
import threading, time
for n in range(1000):
    threading.Thread(target=time.sleep, args=(60,)).start()
print("BREACH")
""",
        ("failed", "time"),
    ),
    "memory_bomb": Hostile(
        """
x = bytearray(1 << 40)
""",
        ("memory",),
        says="MemoryError",
    ),
    "memory_bomb_slow": Hostile(
        """
x = []
while True:
    x.append(bytearray(1 << 20))
""",
        ("memory",),
        says="MemoryError",
    ),
    "memory_bomb_many": Hostile(
        """
import os, time
for _ in range(6):
    if os.fork() == 0:
        break
x = bytearray(b"x") * (100 << 20)
time.sleep(60)
""",
        ("memory",),
    ),
    "memory_in_tmpfs": Hostile(
        """
for n in range(1000):
    open(f"/dev/shm/{n}", "wb").write(bytes(4 << 20))
print("BREACH")
""",
        ("failed",),
        says="No space left",
    ),
    "memory_in_memfd": Hostile(
        """
import os
os.memfd_create("x")
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "endless_loop": Hostile(
        """
while True:
    pass
""",
        ("cpu", "time"),
    ),
    "endless_sleep": Hostile(
        """
import time
time.sleep(1000)
""",
        ("time",),
    ),
    "stdin_hang": Hostile(
        """
import sys
print(repr(sys.stdin.read()))
print(input())
""",
        ("failed",),
        says="EOFError",
    ),
    "ignores_signals": Hostile(
        """
import signal, time
for n in range(1, 65):
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(0.01)
""",
        ("time",),
    ),
    "read_file_of_user": Hostile(
        """
print(open("@SECRET@").read(), "BREACH")
""",
        ("failed",),
        says="FileNotFoundError",
    ),
    "read_home": Hostile(
        """
import os
for place in ("/root/.ssh", "/home", "/etc/shadow", "/var", "/run", "/sys", "/mnt"):
    if os.path.exists(place):
        print("BREACH", place)
"""
    ),
    "read_environment": Hostile(
        """
import os
print(sorted(os.environ))
if "HOSTILE_SECRET" in os.environ:
    print("BREACH")
"""
    ),
    "write_outside": Hostile(
        """
import os
for place in ("/", "/usr", "/usr/lib", "/etc", "/dev", "@OUTSIDE@", os.path.dirname(os.__file__)):
    try:
        open(place + "/breach", "w").write("x")
        print("BREACH", place)
    except OSError:
        pass
"""
    ),
    "symlink_out": Hostile(
        """
import os
os.symlink("@SECRET@", "/tmp/link")
os.symlink("../../../..@OUTSIDE@", "/tmp/up")
for path in ("/tmp/link", "/tmp/up/x"):
    try:
        open(path, "a").write("x")
        print("BREACH")
    except OSError as error:
        print(error)
"""
    ),
    "hard_link_of_system_file": Hostile(
        """
import os
os.link(os.__file__, "/tmp/os.py")
print("BREACH")
""",
        ("failed",),
    ),
    "kill_parent": Hostile(
        """
import os, signal
for pid in (1, os.getppid(), @PID@):
    for number in (9, 15, 2, 19):
        try:
            os.kill(pid, number)
        except OSError:
            pass
print("alive")
""",
        says="alive",
    ),
    "kill_everyone": Hostile(
        """
import os
os.kill(-1, 9)
""",
        ("failed",),
        says="ProcessLookupError",
    ),
    "kill_itself": Hostile(
        """
import os
os.kill(os.getpid(), 9)
""",
        ("signal",),
    ),
    "proc_tricks": Hostile(
        """
import os
for path in ("/proc", "/proc/1/root", "/proc/self/exe", "/proc/self/mem", "/proc/@PID@/environ",
             "/proc/sysrq-trigger", "/dev/fd/0", "/dev/mem", "/dev/kmsg", "/dev/tty"):
    if os.path.exists(path):
        print("BREACH", path)
"""
    ),
    "open_descriptors": Hostile(
        """
import os
for fd in range(5, 64):
    try:
        os.fstat(fd)
        print("BREACH", fd)
    except OSError:
        pass
"""
    ),
    "fchdir_out": Hostile(
        """
import os
for fd in range(3, 64):
    try:
        os.fchdir(fd)
        print("BREACH")
    except OSError:
        pass
os.chdir("/")
for _ in range(64):
    os.chdir("..")
print("BREACH" if os.path.exists("@SECRET@") else "inside")
""",
        says="inside",
    ),
    "chroot_out": Hostile(
        """
import os
os.mkdir("/tmp/a")
os.chroot("/tmp/a")
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "huge_output": Hostile(
        """
import os
while True:
    os.write(1, b"x" * 65536)
""",
        ("output",),
    ),
    "huge_error_output": Hostile(
        """
import os
while True:
    os.write(2, b"x" * 65536)
""",
        ("output",),
    ),
    "huge_line": Hostile(
        """
print("x" * (40 << 20))
""",
        ("output",),
    ),
    "sparse_output": Hostile(
        """
import os
os.ftruncate(1, 1 << 40)
""",
        ("failed", "output"),
    ),
    "huge_file": Hostile(
        """
with open("/tmp/x", "wb") as file:
    while True:
        file.write(bytes(1 << 20))
""",
        ("failed",),
    ),
    "many_files": Hostile(
        """
for n in range(100000):
    open(f"/tmp/{n}", "w").close()
print("BREACH")
""",
        ("failed",),
        says="No space left",
    ),
    "many_descriptors": Hostile(
        """
import os
while True:
    os.open("/dev/null", os.O_RDONLY)
""",
        ("failed",),
        says="Too many open files",
    ),
}
