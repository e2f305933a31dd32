"""`dora-rl serve --tinker`: what is for clients of the tinker SDK, and what all servers share."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.commands.arguments import argument, at_least
from dora_rl.serve import KEY_VARIABLE
from dora_rl.types import UserError
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.tinker.server import TinkerOptions

KEY_CHARS_MIN = 8
KEY_IN_SIGHT = (
    "--api-key would show the key to everybody who can list processes; write it into a file "
    f"(--api-key-file FILE, one key a line) or into the variable {KEY_VARIABLE}"
)
KEY_PREFIX = "tml-"  # the SDK sends no other keys
VERSIONS_MAX = 4
TINKER_ARGUMENTS = (
    argument(
        "--tinker",
        type=Path,
        metavar="DIR",
        help="train and sample for clients of the tinker SDK instead; what they save is in DIR",
    ),
    argument("--clients-max", type=at_least(1), default=8, help="training clients (--tinker)"),
    argument("--rank-max", type=at_least(1), default=32, help="of an adapter (--tinker)"),
    argument(
        "--snapshots-max",
        type=at_least(1),
        default=16,
        help="kept of a training client, beside those with a name (--tinker)",
    ),
    argument("--tokenizer-id", metavar="NAME", help="what clients load (--tinker; the directory)"),
)
# What has a meaning for chats alone, and its default.
NOT_TINKER = {"version": "last", "chat_template": None, "record": None, "client_templates": False}


def plain_checks(args: argparse.Namespace) -> list[tuple[object, str]]:
    """Of every kind of server."""
    return [
        (args.api_key is None, KEY_IN_SIGHT),
        (0 <= args.port < 65536, f"--port {args.port} is not between 0 and 65535"),
    ]


def serve_tinker(args: argparse.Namespace) -> int:
    from dora_rl.weights.run_models import is_run

    wrong = next((name for name, value in NOT_TINKER.items() if getattr(args, name) != value), "")
    require(
        *plain_checks(args),
        (not wrong, f"--{wrong.replace('_', '-')} has no meaning with --tinker"),
        (args.model.is_dir() and not is_run(args.model), f"{args.model} is no model directory"),
    )
    try:
        from dora_rl.serve.server import serve_until_signal
        from dora_rl.tinker.server import TinkerServer
    except ImportError as error:
        raise UserError(f"{error}; install it with  pip install 'dora-rl[serve]'") from None
    options = _options(args)
    server = TinkerServer(options, args.model)

    def ready(_: object) -> None:
        say(f"{options.limits.names[0]!r} for the tinker SDK: TINKER_BASE_URL={server.url}")
        if options.api_keys and args.api_key_file is None and not os.environ.get(KEY_VARIABLE):
            say(f"API key (made for this start): {options.api_keys[0]}")

    serve_until_signal(server, ready)
    say("stopped")
    return 0


def _options(args: argparse.Namespace) -> TinkerOptions:
    from dora_rl.chat.http import HttpLimits
    from dora_rl.engine.options import EngineOptions
    from dora_rl.io.connection import is_loopback
    from dora_rl.setup.prepare import choose_device
    from dora_rl.tinker.server import TinkerOptions
    from dora_rl.tinker.service import Limits

    device, path = choose_device(args.device, "--device"), args.model.resolve()
    keys = api_keys(args.api_key_file)
    if not keys and not is_loopback(args.host):
        keys = (KEY_PREFIX + secrets.token_urlsafe(24),)
    require(
        (
            all(key.startswith(KEY_PREFIX) for key in keys),
            f"the tinker SDK takes no key that does not begin with {KEY_PREFIX}",
        )
    )
    engine = EngineOptions(
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        context_max=args.context_max,
        versions_max=args.versions_max or VERSIONS_MAX,
        lora_rank=args.rank_max,
        memory_share=0.5,  # of a GPU: the learner is in the same process
        lora_head=device == "cpu",
    )
    limits = Limits(
        names=tuple(dict.fromkeys((args.name or path.name, str(args.model), str(path)))),
        tokenizer=args.tokenizer_id or str(path),
        clients_max=args.clients_max,
        rank_max=args.rank_max,
        head=engine.lora_head,
        open_max=args.requests_max,
        snapshots_max=args.snapshots_max,
        sessions_max=args.sessions_max,
        session_idle_s_max=args.session_idle_s,
    )
    return TinkerOptions(
        directory=args.tinker,
        limits=limits,
        engine=engine,
        host=args.host,
        port=args.port,
        api_keys=keys,
        allowed_hosts=tuple(args.allowed_host),
        grace_s=args.grace_s,
        num_threads=args.threads,
        http=HttpLimits(
            connections_max=args.connections_max, body_bytes_max=args.body_mib_max << 20
        ),
    )


def api_keys(path: Path | None) -> tuple[str, ...]:
    """Those of the file, else that of the environment."""
    if path is None:
        keys = [os.environ.get(KEY_VARIABLE, "").strip()]
    else:
        try:
            keys = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api-key-file {path} cannot be read: {error}") from None
    keys = [key for key in keys if key]
    if path is not None and not keys:
        raise UserError(f"--api-key-file {path} is empty; write one key on each line")
    wrong = [key for key in keys if not (key.isascii() and key.isprintable() and " " not in key)]
    if wrong or any(len(key) < KEY_CHARS_MIN for key in keys):
        where = f"--api-key-file {path}" if path is not None else f"${KEY_VARIABLE}"
        raise UserError(
            f"{where}: a key has at least {KEY_CHARS_MIN} characters, all printable ASCII, no blank"
        )
    return tuple(dict.fromkeys(keys))


def say(line: str) -> None:
    print(f"dora-rl serve: {line}", file=sys.stderr, flush=True)
