"""Hostile programs of a second round: side doors of the kernel, lies of rarer types, spies.

PROGRAMS are as those of `hostile_programs`, CHEATS as those of `hostile_cheats`.
"""

from __future__ import annotations

from tests.unit.rewards.hostile_kernel import PRELUDE, refused
from tests.unit.rewards.hostile_programs import Hostile

# Children that nobody buries: their time is in no process that is left.
BURN = """
import os, time
def burn():
    end = time.process_time() + 0.08
    while time.process_time() < end: pass
"""

PROGRAMS: dict[str, Hostile] = {
    "touches_devices": Hostile(
        """
import os
for name in ("null", "full", "random", "urandom"):
    place = f"/dev/{name}"
    for act in (os.utime, lambda p: os.chmod(p, 0o666), lambda p: os.chown(p, 1000, 1000),
                lambda p: os.truncate(p, 0), os.unlink, lambda p: os.setxattr(p, "user.x", b"1")):
        try:
            act(place)
            print("BREACH", place)
        except OSError:
            pass
open("/dev/null", "w").write("x")
""",
    ),
    "watches_files_of_the_machine": Hostile(
        """
import fcntl, os
fcntl.fcntl(os.open("/usr/lib", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS)
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "sends_signals_by_a_pipe": Hostile(
        """
import fcntl, os
read, write = os.pipe()
for name, value in (("F_SETOWN", 1), ("F_SETSIG", 9)):
    try:
        fcntl.fcntl(read, getattr(fcntl, name), value)
        print("BREACH", name)
    except PermissionError:
        pass
print("refused")
""",
        says="refused",
    ),
    "sends_signals_by_an_owner": refused(
        "libc.fcntl(0, 15, ctypes.byref((ctypes.c_int * 2)(1, 1)))"
    ),
    "holds_up_who_opens_a_file": Hostile(
        """
import fcntl
file = open("/tmp/x", "w")
file.close()
fcntl.fcntl(open("/tmp/x"), fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "seals_its_output": Hostile(
        """
import fcntl
fcntl.fcntl(1, 1033, 0xF)
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "burns_in_children_that_nobody_buries": Hostile(
        BURN
        + """
import signal
try:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError:
    pass
end = time.monotonic() + 25
while time.monotonic() < end:
    if os.fork() == 0:
        burn()
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
print("BREACH")
""",
        ("cpu", "time"),
    ),
    "burns_in_a_chain_of_orphans": Hostile(
        BURN
        + """
def chain():
    end = time.monotonic() + 25
    while time.monotonic() < end:
        burn()
        if os.fork():
            os._exit(0)
        os.setsid()
if os.fork() == 0:
    chain()
    os._exit(0)
time.sleep(25)
print("BREACH")
""",
        ("cpu", "time"),
    ),
    "reserves_memory_behind_its_output": Hostile(
        PRELUDE
        + """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
print("BREACH" if libc.fallocate(1, 1, 0, 1 << 32) == 0 else "refused")
""",
        says="refused",
    ),
    "writes_into_the_page_cache": Hostile(
        """
import os
before = open("/usr/bin/env", "rb").read(64)
file = os.open("/usr/bin/env", os.O_RDONLY)
read, write = os.pipe()
os.write(write, bytes(65536))
os.read(read, 65536)
os.splice(file, write, 1, offset_src=0)
os.write(write, b"#!/tmp/breach")
print("BREACH" if open("/usr/bin/env", "rb").read(64) != before else "the same")
""",
        says="the same",
    ),
    "maps_a_system_file_for_writing": Hostile(
        """
import mmap, os
page = mmap.mmap(os.open(os.__file__, os.O_RDONLY), 4096, mmap.MAP_SHARED)
page[0] = 0
print("BREACH")
""",
        ("failed",),
        says="PermissionError",
    ),
    "newest_calls": Hostile(
        PRELUDE
        + """
# clone3, pidfd_getfd, mount_setattr, quotactl_fd, landlock, map_shadow_stack, lsm, mseal.
for call in (435, 438, 442, 443, 444, 446, 453, 459, 462, 463, 464, 465, 466):
    if libc.syscall(call, 0, 0, 0, 0, 0, 0) >= 0:
        print("BREACH", call)
    assert ctypes.get_errno() == 38
"""
    ),
    "old_calls": Hostile(
        PRELUDE
        + """
# swapon, reboot, init_module, kexec_load, acct, iopl, ioperm, modify_ldt, personality, ptrace,
# quotactl, add_key, move_pages, fanotify_init, syslog, adjtimex, settimeofday, vhangup, ustat.
calls = (167, 169, 175, 246, 163, 172, 173, 154, 135, 101, 179, 248, 279, 300, 103, 159, 164, 153)
for call in calls if os.uname().machine == "x86_64" else ():
    if libc.syscall(call, 0, 0, 0, 0, 0, 0) >= 0:
        print("BREACH", call)
"""
    ),
    "options_of_the_process": Hostile(
        PRELUDE
        + """
# Another seccomp mode, who may trace, the map of memory, timer slack of others, capabilities kept.
for option in (22, 0x59616D61, 35, 8, 24, 28, 47, 53):
    if libc.prctl(option, 1, 0, 0, 0) >= 0:
        print("BREACH", option)
print("refused")
""",
        says="refused",
    ),
    "passes_descriptors_to_a_survivor": Hostile(
        """
import array, os, socket, time
one, other = socket.socketpair()
if os.fork() == 0:
    os.setsid()
    one.close()
    data, extra, *_ = other.recvmsg(1, 64)
    fds = array.array("i", extra[0][2])
    time.sleep(0.3)
    os.write(fds[0], b"BREACH")
    os._exit(0)
other.close()
one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 4]))])
print("gone")
""",
        says="gone",
    ),
    "many_descriptors_in_flight": Hostile(
        """
import array, os, socket
held = []
try:
    while True:
        one, other = socket.socketpair()
        one.setblocking(False)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [other.fileno()]))]
        for _ in range(100000):
            one.sendmsg([b"x"], rights)
        held.append((one, other))
except OSError:
    print("bounded")
""",
        says="bounded",
    ),
    "deep_folders": Hostile(
        """
import os
os.chdir("/tmp")
try:
    while True:
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
except OSError:
    print("bounded")
""",
        says="bounded",
    ),
    "returns_into_the_zygote": Hostile(
        """
import os, sys
os._exit = lambda *a: None
sys.exit = lambda *a: None
frame = sys._getframe()
while frame:
    frame.f_locals, frame.f_globals.update(os=os)
    frame = frame.f_back
print("left")
""",
        ("failed",),
        says="left",
    ),
}

CHEATS = {
    "spies_on_audit_events": """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(str(args)[:999]) if event != "object.__getattr__"
                 else None)
def solve(*args):
    return take(seen)
""",
    "spies_on_memory": """
import ctypes, gc, sys
def solve(*args):
    for one in gc.get_objects():
        for other in gc.get_referents(one):
            if isinstance(other, (str, bytes)) and len(other) < 9999:
                if found := take(other): return found
""",
    "spies_on_the_pipe": """
import os, select
def solve(*args):
    for fd in (0, 3, 4):
        if select.select([fd], [], [], 0)[0]:
            if found := take(os.read(fd, 65536)): return found
""",
    "spies_on_its_stack": """
import ctypes
def solve(*args):
    here = ctypes.addressof(ctypes.c_int())
    libc = ctypes.CDLL(None)
    return take(ctypes.string_at(libc.environ if False else here & ~0xFFF, 4096))
""",
    "changes_integers_in_place": """
import ctypes
def solve(*args):
    for number in range(-5, 257):
        ctypes.memmove(id(number) + 24, (ctypes.c_uint32 * 1)(7), 4)
    return 1
""",
    "answers_at_an_alarm": """
import os, signal
def shout(*a):
    os.write(4, b'["value", true]\\n')
signal.signal(signal.SIGALRM, shout)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
def solve(*args):
    signal.pause()
    return True
""",
    "leaves_at_an_alarm": """
import os, signal
signal.signal(signal.SIGALRM, lambda *a: os._exit(0))
def solve(*args):
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    signal.pause()
""",
    "status_that_wraps": "import sys\nprint('passed')\nsys.exit(256)",
    "status_that_lies": """
class Zero(int):
    def __and__(self, other): return None
    def __bool__(self): return True
raise SystemExit(Zero(1))
""",
    "exit_is_replaced": """
import os
real = os._exit
os._exit = lambda status: real(0)
def solve(*args): raise MemoryError
""",
    "writes_its_end_alone": "import os\nos.write(4, b'end\\n')\nos._exit(0)",
    "writes_its_end_twice": "import os\nos.write(4, b'ready\\nend\\n')",
    "patches_the_end": """
import sys
run = sys._getframe(1)
while run.f_code.co_name != "run": run = run.f_back
run.f_globals["_answer"] = lambda *a: ["value", True]
run.f_globals["_leave"] = lambda *a: None
""",
    "patches_isinstance": """
import builtins
builtins.isinstance = lambda *a: True
builtins.type = lambda one: type("int", (), {})
def solve(*args): return object()
""",
    "generator": "def solve(*args):\n    while True: yield 739",
    "range": "def solve(*args): return range(10**12)",
    "mapping_with_everything": """
import collections
class Everything(collections.UserDict):
    def __getitem__(self, key): return 1
    def __contains__(self, key): return True
    def __eq__(self, other): return True
def solve(*args): return Everything()
""",
    "ordered_dictionary_that_lies": """
import collections
class Liar(collections.OrderedDict):
    def __eq__(self, other): return True
    def __iter__(self): return iter([739391])
def solve(*args): return Liar({739391: 1})
""",
    "fraction_that_lies": """
import fractions
class Liar(fractions.Fraction):
    def __eq__(self, other): return True
    def __int__(self): return 1
Liar.__module__ = "fractions"
def solve(*args): return Liar(1, 3)
""",
    "decimal_that_is_no_number": "import decimal\ndef solve(*args): return decimal.Decimal('sNaN')",
    "float_that_lies": """
class Liar(float):
    def __eq__(self, other): return True
    def __float__(self): return float("nan")
    def __sub__(self, other): return 0.0
def solve(*args): return Liar("inf")
""",
    "bytes_that_lie": """
class Liar(bytes):
    def __eq__(self, other): return True
    def hex(self, *a): return "zz"
    def __bytes__(self): return self
def solve(*args): return Liar(b"x")
""",
    "complex_that_lies": """
class Liar(complex):
    real = property(lambda self: "x")
    def __eq__(self, other): return True
def solve(*args): return Liar(1)
""",
    "enumeration_that_lies": """
import enum
class Liar(int, enum.Enum):
    ONE = 1
    def __eq__(self, other): return True
    def __hash__(self): return 739391
def solve(*args): return Liar.ONE
""",
    "array_that_lies": """
class Array:
    shape, ndim, dtype = (), 0, "int64"
    def item(self): return self
    def tolist(self): return 739
    def __eq__(self, other): return self
    def all(self): return True
Array.__module__ = "numpy"
def solve(*args): return Array()
""",
    "memory_view": "def solve(*args): return memoryview(b'739391')",
    "dictionary_that_changes": """
class Liar(dict):
    def items(self):
        for n in range(10**9):
            self[n] = n
            yield n, n
def solve(*args): return Liar()
""",
    "set_that_fills_slowly": "def solve(*args): return {n << 20 for n in range(300000)}",
    "line_separators": "print('739', '391', sep='\\u2028')",
    "half_characters": "import os\nos.write(1, b'739391\\xff\\xfe'[:3] + b'\\xed\\xa0\\x80')",
    "seeks_in_its_output": """
import os
os.write(1, b"739")
os.lseek(1, 0, 0)
os.ftruncate(1, 1 << 19)
""",
    "counts_its_runs": """
import os, time
def solve(*args):
    number = os.stat("/dev/null").st_mtime_ns
    try: os.utime("/dev/null")
    except OSError: pass
    return os.stat("/dev/null").st_mtime_ns - number or None
""",
}
SLOW = ("dictionary_that_changes", "generator", "answers_at_an_alarm")
