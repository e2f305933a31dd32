"""The code sandbox: untrusted programs in namespaces of their own. `box.Sandbox` is the door.

    reward worker (box) -- socket --> zygote -- clone --> init (pid 1) -- fork --> program
        limits over all of the         a warm interpreter   clock, reaping,       rlimits, seccomp,
        run's processes, verdict       in an empty view     report                no capabilities

The zygote has read-only system directories and no network. Every run gets fresh user, mount, pid
and ipc namespaces, and private tmpfs; when its init ends, the kernel kills all that is left.
Modules that the zygote imports use the standard library only.
"""
