"""`dora-rl serve RUN_OR_MODEL`: an OpenAI-compatible endpoint over a run's weights or a model.

Exit status: 0 ended by a signal, 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.commands.arguments import MODEL, argument, check_least
from dora_rl.types import UserError
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.serve.server import ServeOptions
    from dora_rl.weights.run_models import FoundModel

SUMMARY = "serve a run's weights or a model to OpenAI clients"
KEY_VARIABLE = "DORA_RL_API_KEY"


ARGUMENTS = (
    MODEL,
    argument("--host", default="127.0.0.1", help="address to listen on"),
    argument("--port", type=int, default=8000, help="0: any free one"),
    argument(
        "--api-key",
        metavar="KEY",
        help=f"clients must send it (or ${KEY_VARIABLE}); off loopback one is made if none is set",
    ),
    argument(
        "--version",
        default="last",
        metavar="N|best|last",
        help="which weights of a run; last also takes newer ones as they are sealed",
    ),
    argument("--name", help="the model's name (default: that of the directory)"),
    argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ..."),
    argument("--dtype", choices=("float32", "bfloat16"), help="(default: by device)"),
    argument("--threads", type=int, default=0, help="on the CPU; 0: all cores"),
    argument("--context-max", type=int, default=0, help="0: what the model allows"),
    argument("--versions-max", type=int, default=3, help="resident at once"),
    argument("--requests-max", type=int, default=512, help="more get status 429"),
    argument("--sessions-max", type=int, default=4096, help="more get status 429"),
    argument("--session-idle-s", type=float, default=900.0, help="then a session ends"),
    argument("--grace-s", type=float, default=10.0, help="for answers, when ending"),
    argument("--record", type=Path, metavar="FILE", help="ended sessions, as jsonl"),
    argument("--chat-template", type=Path, metavar="FILE", help="instead of the model's"),
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.setup.tokenizer import open_tokenizer
    from dora_rl.weights.run_models import find_model, is_run

    _check(args)
    try:
        from dora_rl.serve.server import ModelServer, serve
    except ImportError as error:
        raise UserError(f"{error}; install it with  pip install 'dora-rl[serve]'") from None
    found = find_model(args.model, args.version)
    watch = args.model if is_run(args.model) and args.version == "last" else None
    options = _options(args, found, watch)
    server = ModelServer(options, found, open_tokenizer(found.directory, False), _say)

    def ready(service: object) -> None:
        del service
        _say(f"{found.label} as {options.name!r} at {server.url}")
        if options.api_key and args.api_key is None and KEY_VARIABLE not in os.environ:
            _say(f"API key (made for this start): {options.api_key}")

    serve(server, ready)
    _say("stopped")
    return 0


def _check(args: argparse.Namespace) -> None:
    check_least(args, 1, "versions_max", "requests_max", "sessions_max")
    folder = args.record.parent if args.record is not None else Path(".")
    template = args.chat_template
    require(
        (0 <= args.port < 65536, f"--port {args.port} is not between 0 and 65535"),
        (folder.is_dir(), f"--record {args.record}: there is no directory {folder}"),
        (template is None or template.is_file(), f"--chat-template {template}: no such file"),
    )


def _options(args: argparse.Namespace, found: FoundModel, watch: Path | None) -> ServeOptions:
    from dora_rl.engine.options import EngineOptions
    from dora_rl.serve.server import ServeOptions, device_of, is_loopback
    from dora_rl.serve.service import ServeLimits

    device = device_of(args.device)
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(args.host):
        key = secrets.token_urlsafe(24)
    engine = EngineOptions(
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        context_max=args.context_max,
        versions_max=args.versions_max if watch is not None else 1,
    )
    return ServeOptions(
        name=args.name or args.model.resolve().name,
        host=args.host,
        port=args.port,
        api_key=key,
        watch=watch,
        grace_s=args.grace_s,
        record=args.record,
        chat_template=args.chat_template.read_text() if args.chat_template is not None else None,
        num_threads=args.threads,
        engine=engine,
        limits=ServeLimits(args.requests_max, args.sessions_max, args.session_idle_s),
    )


def _say(line: str) -> None:
    print(f"dora-rl serve: {line}", file=sys.stderr, flush=True)
