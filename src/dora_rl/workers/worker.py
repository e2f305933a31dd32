"""`python -m dora_rl.workers.worker`: one worker process of a local run.

The parent writes one JSON line to standard input: the role, the name, where to connect, the key of
the run and what the role needs. The worker ends when its controller does, whatever it is doing:
nobody may write into the run directory beside the controller that resumes the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from safetensors import SafetensorError

from dora_rl.config import RunConfig
from dora_rl.io.proof import Certificates, RunKey
from dora_rl.out_of_memory import arm
from dora_rl.setup.devices import BELOW_NORMAL, PERCENT, PRIORITY, VISIBLE
from dora_rl.setup.priority import make_way
from dora_rl.types import BaseDiffers, UserError
from dora_rl.user_code import UserCodeError, listen, raised
from dora_rl.workers.fork_server import die_with_parent
from dora_rl.workers.last_words import DISK_ERRORS, full_line, is_full, last_words, send_user_errors
from dora_rl.workers.messages import Channel, End, Fatal, Fault, Hello, Message, Ready, Send

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told at its start."""

    role: str
    name: str
    incarnation: int
    address: str
    key: str
    run_dir: str
    config: RunConfig
    extra: dict[str, Any]

    @property
    def run_key(self) -> RunKey:
        return key_of(self.config, bytes.fromhex(self.key))

    @property
    def listens_at(self) -> str:
        """The address that what it serves is bound to: its host's, unless the user says more."""
        return self.config.runtime.bind_address or str(self.extra["ip"])


def key_of(config: RunConfig, secret: bytes) -> RunKey:
    """What a process of this run proves itself with."""
    runtime = config.runtime
    if not runtime.tls_certificate:
        return RunKey(secret)
    paths = (runtime.tls_certificate, runtime.tls_key, runtime.tls_authority)
    return RunKey(secret, Certificates(*paths))


def read_setup(line: str) -> Setup:
    """With the sizes that the memory plan has chosen for this worker in the configuration."""
    data = json.loads(line)
    config: dict[str, Any] = data["config"]
    for section, values in data["extra"].get("sizes", {}).items():
        config[section] = config[section] | values
    if data["role"] == "learner" and config["trainer"]["device"] == "auto":
        config["trainer"] = config["trainer"] | {"device": data["extra"]["device"]}
    return Setup(**{**data, "config": RunConfig.model_validate(config)})


def heartbeat(send: Callable[[], None], period_s: float) -> None:
    """Call `send` every so often from a thread of its own, until the connection ends."""

    def run() -> None:
        while True:
            time.sleep(period_s)
            try:
                send()
            except (OSError, EOFError):
                return

    threading.Thread(target=run, daemon=True).start()


class Role:
    """What a worker does, as an object: the same in a process of its own (`take_turns`) and in the
    inline world."""

    def __init__(self, setup: Setup, send: Send) -> None:
        self.setup, self.send = setup, send

    @property
    def idle_s(self) -> float:
        """How long it may wait for a message where there is nothing to do."""
        return 60.0

    def join(self) -> None:
        """Say that it is there."""
        self.send(Ready())

    def hear(self, message: Message) -> None:
        raise NotImplementedError

    def turn(self) -> bool:
        """One round of its own work; False: there is no more to do at once."""
        return False

    def close(self) -> None:
        """A clean end."""

    def drop(self) -> None:
        """Any end, also that of the controller: nothing is written any more."""


def take_turns(role: Role, channel: Channel) -> None:
    """Until the controller says `End` or is gone."""
    role.join()
    try:
        while True:
            busy = role.turn()
            while channel.poll(0.0 if busy else role.idle_s):
                if isinstance(message := channel.receive(), End):
                    return role.close()
                role.hear(message)
                busy = True
    finally:
        role.drop()


def end_with_parent() -> None:
    """Die with the controller, at once, even in the middle of a long computation.

    Linux kills us itself, which also works where user code holds the interpreter's lock. Anywhere
    else (and where the parent died before the call) the end of standard input says it.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    die_with_parent()
    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    setup = read_setup(sys.stdin.readline())
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the controller decides when to end
    on_cpu = setup.extra.get("device") == "cpu"
    if setup.role == "evaluator" or (setup.role == "instance" and on_cpu):
        make_way()
    percent = setup.extra.get("mps_percent", 100)
    variables = {
        VISIBLE: ",".join(setup.extra.get("gpus") or ()),
        PERCENT: str(percent) if percent < 100 else "",
        PRIORITY: BELOW_NORMAL if setup.extra.get("mps_yields") else "",
    }
    # Before anything asks CUDA.
    os.environ.update({name: value for name, value in variables.items() if value})
    if setup.config.runtime.threads:
        _limit_threads(setup.config.runtime.threads)
    if setup.role == "learner" and learner_device(setup).startswith("cuda"):
        grow_in_place()
    if setup.extra.get("memory_limit"):
        _limit_memory(setup)
    serve(setup)
    return 0


def _limit_threads(num_threads: int) -> None:
    """Torch reads the variable when it is imported, which a forked worker has behind it."""
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def learner_device(setup: Setup) -> str:
    """What `trainer.device` says, or else the device of the run."""
    wanted = setup.config.trainer.device
    return str(setup.extra["device"]) if wanted == "auto" else wanted


def gpu_index(setup: Setup) -> int:
    """Of the GPU that this worker computes on, among those that it sees. Rank r of the learner has
    the r-th from the first one on."""
    extra = setup.extra
    name = learner_device(setup) if setup.role == "learner" else str(extra["device"])
    return int(name.partition(":")[2] or 0) + int(extra.get("rank", 0))


def _limit_memory(setup: Setup) -> None:
    """What the allocator may hold of its GPU, for a run that plans for a smaller one."""
    import torch

    share = min(1.0, float(setup.extra["memory_limit"]))
    torch.cuda.set_per_process_memory_fraction(share, gpu_index(setup))


def grow_in_place() -> None:
    """Packs differ in size, and torch's allocator keeps a block of each size that it was asked for:
    after some steps the learner would hold a fifth more than it needs at any time. Segments that
    grow have one block of each. What the user has set stays."""
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    import torch

    choose = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (choose or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def serve(setup: Setup) -> None:
    """Connect and do what the role does, until the controller says `End` or is gone."""
    channel = Channel.connect(setup.address, setup.run_key)
    arm(setup.role)
    channel.send(Hello(setup.role, setup.name, setup.incarnation))
    listen(send_user_errors(channel.send))
    try:
        program = program_of(setup.role)
        if isinstance(program, type):
            take_turns(program(setup, channel.send), channel)
        else:
            program(setup, channel)
    except (EOFError, ConnectionError):
        return  # the controller is gone
    except Exception as error:
        with contextlib.suppress(OSError):  # the controller may be gone too
            channel.send(parting(setup, error))
        raise


def parting(setup: Setup, error: Exception) -> Fatal | Fault:
    """What a worker says that ends with this error."""
    if not isinstance(error, (UserError, SafetensorError, *DISK_ERRORS)):
        return Fault(last_words(error))
    if isinstance(error, UserCodeError):
        raised(str(error).partition(" raised ")[0], error.__cause__ or error)
    shared = [
        setup.extra[name] for name in ("weights_root", "transfer_root") if name in setup.extra
    ]
    reason = full_line(setup.run_dir, error, *shared) if is_full(error) else str(error)
    ends_run = is_full(error) or isinstance(error, (BaseDiffers, UserCodeError))
    # There is one learner, and the next one would come to the same place.
    ends_run |= setup.role == "learner" and isinstance(error, UserError)
    return Fatal(reason, ends_run)


PROGRAMS = {
    "instance": "dora_rl.workers.rollout:RolloutWorker",
    "learner": "dora_rl.workers.learner:serve_learner",
    "reward": "dora_rl.workers.reward:Scorer",
    "env": "dora_rl.workers.environment:serve_environments",
    "evaluator": "dora_rl.workers.evaluator:Evaluator",
    "relay": "dora_rl.workers.relay:RelayWorker",
    "storage": "dora_rl.store.storage:Storage",
}


def program_of(role: str) -> type[Role] | Callable[[Setup, Channel], None]:
    """What a role runs, or is; imported only now. A benchmark's role is its own `module:name`."""
    module, _, function = PROGRAMS.get(role, role).partition(":")
    assert function, f"no worker has the role {role!r}"
    return getattr(import_module(module), function)


if __name__ == "__main__":
    sys.exit(main())
