"""The code sandbox: untrusted programs in namespaces of their own. `box.Sandbox` is the door.

    reward worker (box) -- socket --> zygote -- clone --> init (pid 1) -- fork --> program
        limits over all of the         a warm interpreter   clock, reaping,       rlimits, seccomp,
        run's processes, verdict       in an empty view     report                no capabilities

The zygote has read-only system directories and no network. Every run gets fresh user, mount, pid,
ipc, host name and cgroup namespaces, and private tmpfs; when its init ends, the kernel kills all
that is left. Two pipes lead from the program to `dialog`: asks go in once it is ready, values come
out, and are judged outside (`rewards.statements`).
Modules that the zygote imports use the standard library only.
"""
