"""The file system that programs see: system directories read-only, nothing of the user's.

Builds a tmpfs with bind mounts, makes it the root and forgets the old one. There is no /proc and
no /sys. Only the standard library. Invariant: after `enter`, nothing outside the view can be named,
and nothing in it can be written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from dora_rl.rewards.sandbox import kernel

# Not /dev/zero: shared mappings of it are memory that nothing counts.
DEVICES = ("null", "full", "random", "urandom")
LINKED = ("bin", "sbin", "lib", "lib32", "lib64")
SPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
NOBODY = 65534
INNER_ID = 1000


def map_ids(proc: int, uid: int, gid: int) -> None:
    """In a new user namespace: `uid` and `gid` of the one outside are ours, nobody else exists.

    They are arguments, because inside a namespace without a map every id reads as `NOBODY`.
    """
    _write_proc(proc, "setgroups", "deny")
    _write_proc(proc, "gid_map", f"{INNER_ID} {gid} 1")
    _write_proc(proc, "uid_map", f"{INNER_ID} {uid} 1")


def _write_proc(proc: int, name: str, text: str) -> None:
    file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def enter(base: str, readable: Sequence[str], proc: int) -> None:
    """Make `base`, an empty directory, the root of a view that shows only `readable`."""
    powerful = _leave_namespaces(proc)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", base, "tmpfs", flags, "size=1m,mode=755")
    _fill(base, readable)
    os.chdir(base)
    # The old root goes on top of the new one, and from there away.
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount("none", "/", "", flags | kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)
    if powerful:
        _become_nobody()


def _leave_namespaces(proc: int) -> bool:
    """New mount, network, ipc, host name and cgroup namespaces. True if we are really root."""
    try:
        kernel.unshare(SPACES)
    except PermissionError:
        # An ordinary user may do this in a user namespace of its own.
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER)
        map_ids(proc, uid, gid)
        kernel.unshare(SPACES)
        return False
    return True


def _become_nobody() -> None:
    """Root outside must not be who runs programs: limits do not bind it, and files are its own."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Otherwise /proc/self would belong to root, and no run could write its id map.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _fill(base: str, readable: Sequence[str]) -> None:
    for name in LINKED:
        path = f"/{name}"
        if os.path.islink(path):
            os.symlink(os.readlink(path), base + path)
        elif os.path.isdir(path):
            _bind(path, base)
    for path in ("/usr", "/etc/ld.so.cache", "/etc/alternatives", *_outermost(readable)):
        if os.path.exists(path):
            _bind(path, base)
    for name in DEVICES:
        _bind(f"/dev/{name}", base, device=True)
    for name in ("tmp", "dev/shm", "etc"):
        os.makedirs(f"{base}/{name}", exist_ok=True)
    # Without /proc there is no /dev/fd; the run's input lies here.
    os.symlink("/tmp/.stdin", f"{base}/dev/stdin")
    with open(f"{base}/etc/passwd", "w") as file:
        file.write(f"user:x:{INNER_ID}:{INNER_ID}::/tmp:/bin/sh\n")


def _outermost(paths: Sequence[str]) -> list[str]:
    """Real paths, without those that lie inside another one or inside /usr."""
    kept = ["/usr"]
    for path in sorted({os.path.realpath(path) for path in paths}):
        if not any(path == other or path.startswith(other + "/") for other in kept):
            kept.append(path)
    return kept[1:]


def placed(path: str) -> str:
    """Where a path lies in the view: the private /tmp of a run would hide what is below it."""
    return f"/view{path}" if path.startswith("/tmp/") else path


def _bind(path: str, base: str, *, device: bool = False) -> None:
    target = base + placed(path)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "x").close()
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)
    # A device can be written to all the same; but not its times, which every run would see.
    attributes = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_RDONLY
    if not device:
        attributes |= kernel.MOUNT_ATTR_NODEV
    kernel.restrict_mount(target, attributes)
