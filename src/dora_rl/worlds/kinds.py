"""The kinds of a run: processes of this machine, one process, a cluster. The loop is the same."""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec

from dora_rl.config import RunConfig
from dora_rl.config.running import RuntimeConfig
from dora_rl.controller.run import Run
from dora_rl.io.proof import Certificates
from dora_rl.setup.prepare import Prepared
from dora_rl.types import UserError
from dora_rl.user_code import require
from dora_rl.workers.fork_server import ForkServer
from dora_rl.worlds.local import open_local


def check_kind(config: RunConfig) -> None:
    """What a kind of run cannot do or cannot do without, as far as it shows before the start."""
    world, mode = config.runtime.world, os.environ.get("RAY_AUTH_MODE", "token")
    problems = (
        (
            world == "inline" and config.resources.learner_ranks > 1,
            'resources.learner_ranks: runtime.world = "inline" has one process; set it to 1',
        ),
        (
            world == "ray" and find_spec("ray") is None,
            "runtime.world is ray and Ray is missing: pip install 'dora-rl[cluster]'",
        ),
        (
            world == "ray" and mode != "token",
            f"RAY_AUTH_MODE is {mode!r}: anybody on the network could run code in this cluster; "
            "unset it, and see docs/cluster.md for how hosts share a token",
        ),
    )
    require(*((not is_there, problem) for is_there, problem in problems))
    if config.runtime.tls_certificate:
        check_certificates(config.runtime)


def check_certificates(runtime: RuntimeConfig) -> None:
    """They can be read here, and the run's key does not travel in the clear."""
    try:
        Certificates(runtime.tls_certificate, runtime.tls_key, runtime.tls_authority).check()
    except (OSError, ValueError) as error:
        raise UserError(
            f"runtime.tls_certificate, tls_key and tls_authority cannot be used ({error}); "
            "give PEM files that are on every host and belong together"
        ) from None
    if os.environ.get("RAY_USE_TLS") != "1":
        raise UserError(
            "runtime.tls_certificate is set, but Ray, which hands the run's key to the hosts, "
            "is not encrypted: set RAY_USE_TLS=1 and its certificates, see docs/cluster.md"
        )


def open_run(prepared: Prepared, *, resume: bool, server: ForkServer | None = None) -> Run:
    """What `runtime.world` asks for, ready to run. `server`: see `workers.pool.begin_server`."""
    config = prepared.config
    check_kind(config)
    if config.runtime.world == "local":
        return open_local(prepared, resume=resume, server=server)
    if config.runtime.world == "inline":
        from dora_rl.worlds.inline import open_inline

        return open_inline(prepared, resume=resume)
    authenticate(own=not config.runtime.address)
    from dora_rl.worlds.cluster import open_on_cluster
    from dora_rl.worlds.ray import open_cluster

    cluster = open_cluster(config)
    try:
        return open_on_cluster(prepared, cluster, resume=resume)
    except UserError:
        cluster.close()
        raise


def authenticate(*, own: bool) -> None:
    """Switch Ray's token authentication on; must come before Ray is imported.

    A cluster of our own gets a fresh token; the token of any other is the user's to provide.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    if own and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
