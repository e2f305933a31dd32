"""The system calls that a sandboxed program may make, with their numbers on both machines.

A table for `seccomp`, which refuses every call that is not in it. Only the standard library.
Invariant: no call here names another process, unless `seccomp` looks at its argument as well.
"""

from __future__ import annotations

# Each entry: name, number on x86_64, number on aarch64; "-" where the machine has no such call.
PLAIN = (
    # Files that the view, the tmpfs and the limits allow.
    """
    read 0 63; write 1 64; open 2 -; close 3 57; stat 4 -; fstat 5 80; lstat 6 -; poll 7 -;
    lseek 8 62; pread64 17 67; pwrite64 18 68; readv 19 65; writev 20 66; preadv 295 69;
    pwritev 296 70; preadv2 327 286; pwritev2 328 287; access 21 -; pipe 22 -; pipe2 293 59;
    select 23 -; pselect6 270 72; ppoll 271 73; dup 32 23; dup2 33 -; dup3 292 24;
    sendfile 40 71; splice 275 76; tee 276 77; copy_file_range 326 285;
    flock 73 32; fsync 74 82; fdatasync 75 83; sync_file_range 277 84; truncate 76 45;
    ftruncate 77 46; getdents 78 -; getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50;
    rename 82 -; renameat 264 38; renameat2 316 276; mkdir 83 -; mkdirat 258 34; rmdir 84 -;
    creat 85 -; link 86 -; linkat 265 37; unlink 87 -; unlinkat 263 35; symlink 88 -;
    symlinkat 266 36; readlink 89 -; readlinkat 267 78; chmod 90 -; fchmod 91 52;
    fchmodat 268 53; fchmodat2 452 452; chown 92 -; fchown 93 55; lchown 94 -; fchownat 260 54;
    umask 95 166; openat 257 56; openat2 437 437; newfstatat 262 79; statx 332 291;
    faccessat 269 48; faccessat2 439 439; utime 132 -; utimes 235 -; utimensat 280 88;
    futimesat 261 -; statfs 137 43; fstatfs 138 44; mknod 133 -; mknodat 259 33;
    fallocate 285 47; fadvise64 221 223; readahead 187 213; close_range 436 436; getxattr 191 8;
    lgetxattr 192 9; fgetxattr 193 10; listxattr 194 11; llistxattr 195 12; flistxattr 196 13
    """,
    # Memory of the process itself, which its limits count.
    """
    mprotect 10 226; munmap 11 215; brk 12 214; mremap 25 216; msync 26 227;
    madvise 28 233; munlock 150 229; munlockall 152 231; pkey_mprotect 329 288;
    pkey_alloc 330 289; pkey_free 331 290; get_mempolicy 239 236; membarrier 324 283
    """,
    # Processes and threads; those that name another process only ask.
    """
    fork 57 -; vfork 58 -; execve 59 221; execveat 322 281; exit 60 93; exit_group 231 94;
    wait4 61 260; waitid 247 95; getpid 39 172; getppid 110 173; gettid 186 178;
    getpgid 121 155; setpgid 109 154; getpgrp 111 -; setsid 112 157; getsid 124 156;
    getpriority 140 141; getrlimit 97 163; setrlimit 160 164; getrusage 98 165; times 100 153;
    arch_prctl 158 -; set_tid_address 218 96; set_robust_list 273 99; rseq 334 293;
    futex 202 98; futex_waitv 449 449; futex_wake 454 454; futex_wait 455 455;
    futex_requeue 456 456; sched_yield 24 124; sched_getaffinity 204 123;
    sched_getparam 143 121; sched_getscheduler 145 120; sched_get_priority_max 146 125;
    sched_get_priority_min 147 126; sched_rr_get_interval 148 127; getcpu 309 168; pause 34 -;
    restart_syscall 219 128; getuid 102 174; getgid 104 176; geteuid 107 175; getegid 108 177;
    getresuid 118 148; getresgid 120 150; getgroups 115 158; capget 125 90; uname 63 160;
    sysinfo 99 179; getrandom 318 278
    """,
    # Signals, time and waiting.
    """
    rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136;
    rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132;
    pidfd_send_signal 424 424; alarm 37 -; getitimer 36 102; setitimer 38 103; signalfd 282 -;
    signalfd4 289 74; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113;
    clock_getres 229 114; gettimeofday 96 169; time 201 -; timer_create 222 107;
    timer_settime 223 110; timer_gettime 224 108; timer_getoverrun 225 109;
    timer_delete 226 111; timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87;
    epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -;
    epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -; eventfd2 290 19
    """,
    # Between the ends of a socketpair; no socket can be made or named, also not by an option.
    """
    sendto 44 206; recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; sendmmsg 307 269;
    recvmmsg 299 243; shutdown 48 210; getsockname 51 204; getpeername 52 205;
    getsockopt 55 209
    """,
)

# Only with arguments that `seccomp` finds harmless.
CHECKED = """
clone 56 220; mmap 9 222; socketpair 53 199; ioctl 16 29; prctl 157 167; prlimit64 302 261;
setpriority 141 140; sched_setaffinity 203 122; kill 62 129; tkill 200 130; tgkill 234 131;
rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240; pidfd_open 434 434; fcntl 72 25
"""


def numbers(table: str, machine: str) -> dict[str, int]:
    """Of the calls of one text that this machine has."""
    column = ("x86_64", "aarch64").index(machine) + 1
    entries = [entry.split() for entry in table.split(";")]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}
