"""`dora-rl eval`, `export` and `serve`: what a run's weights, or a model's, are good for.

Exit status of `eval`: 0 there are scores, 1 too many answers failed
(`evaluation.failed_share_max`) and there is none, 2 the input is wrong. `serve` ends by a signal.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.commands.arguments import (
    JSON,
    argument,
    at_least,
    command,
    prepare_output,
    write_json,
)
from dora_rl.commands.tinker import (
    KEY_VARIABLE,
    TINKER_ARGUMENTS,
    api_keys,
    plain_checks,
    say,
    serve_tinker,
)
from dora_rl.types import UserError
from dora_rl.user_code import listen, origin_of, require, trace_of

if TYPE_CHECKING:
    from dora_rl.serve.service import ServeOptions

TRACES_MAX = 3  # tracebacks of the user's code that are shown
MODEL = argument("model", type=Path, metavar="RUN_OR_MODEL", help="a run or a model")


@command(
    "evaluate a run's weights or a model on held-out prompts",
    MODEL,
    argument("overrides", nargs="*", default=[], help="section.key=value of the configuration"),
    argument("--config", type=Path, help="data, reward and sampling (default: those of the run)"),
    argument("--step", default="last", metavar="N|best|last", help="which weights"),
    argument("--num-prompts", type=at_least(1), metavar="N", help="held-out prompts"),
    argument("--samples", type=at_least(1), metavar="K", help="sampled answers per prompt"),
    JSON,
)
def evaluate(args: argparse.Namespace) -> int:
    from dora_rl.observe.eval_figures import TAIL_FILE, failed_text, has_failed
    from dora_rl.setup.settings import load_config
    from dora_rl.weights.run_models import find_model, is_run
    from dora_rl.worlds.evaluate_once import evaluate_once

    prepare_output(args.json)
    found = find_model(args.model, args.step)
    require(
        (
            args.config is not None or is_run(args.model),
            f"{args.model} is a model; add --config FILE.toml with data and reward",
        )
    )
    config = load_config(args.config or args.model / "config.json", args.overrides)
    traces: dict[str, str] = {}
    listen(lambda what, error: traces.update({origin_of(error): trace_of(error)}))
    figures = evaluate_once(
        config,
        found,
        num_prompts=args.num_prompts or config.evaluation.num_prompts,
        num_samples=args.samples or config.evaluation.num_samples,
        tail_file=args.model / TAIL_FILE if is_run(args.model) else None,
    )
    shown = [f"  {name:14} {v:.4g}" for name, v in figures.items() if isinstance(v, float)]
    print(found.label, *shown, sep="\n")
    write_json(args.json, {"model": found.label, "version": found.version, **figures})
    for trace in list(traces.values())[:TRACES_MAX]:
        print(trace, file=sys.stderr)
    if text := failed_text(figures):
        print(f"{'failed' if has_failed(figures) else 'note'}: {text}")
    return 1 if has_failed(figures) else 0


@command(
    "write a run's weights as a Hugging Face directory",
    argument("run", type=Path, metavar="RUN", help="run directory"),
    argument("out", type=Path, metavar="OUT_DIR", help="a new or empty directory"),
    argument(
        "--step",
        default="last",
        metavar="N|best|last",
        help="weights after N training steps (default: the newest)",
    ),
)
def export(args: argparse.Namespace) -> int:
    from dora_rl.weights.run_models import export_model, find_model, run_config

    config = run_config(args.run)
    found = find_model(args.run, args.step)
    export_model(found, args.out, config.checkpoint.shard_bytes_max)
    print(f"wrote {found.label} to {args.out}")
    return 0


@command(
    "serve a run's weights or a model to OpenAI clients",
    MODEL,
    argument("--host", default="127.0.0.1", help="address to listen on"),
    argument("--port", type=int, default=8000, help="0: any free one"),
    argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"keys, one a line; clients must send one of them (or that of ${KEY_VARIABLE}); off "
        "loopback one is made if none is set",
    ),
    argument("--api-key", help=argparse.SUPPRESS),
    argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that clients and web pages may call this server by, beside loopback's; again "
        "for more",
    ),
    argument("--client-templates", action="store_true", help="take chat templates from clients"),
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
    argument("--versions-max", type=at_least(1), help="resident at once (3; of --tinker: 4)"),
    argument("--requests-max", type=at_least(1), default=512, help="more get status 429"),
    argument("--sessions-max", type=at_least(1), default=4096, help="more get status 429"),
    argument("--connections-max", type=at_least(1), default=512, help="more get status 503"),
    argument("--body-mib-max", type=at_least(1), default=16, help="larger ones get status 413"),
    argument("--session-idle-s", type=float, default=900.0, help="then a session ends"),
    argument("--grace-s", type=float, default=10.0, help="for answers, when ending"),
    argument("--record", type=Path, metavar="FILE", help="ended sessions, as jsonl"),
    argument("--chat-template", type=Path, metavar="FILE", help="instead of the model's"),
    *TINKER_ARGUMENTS,
    about="With --tinker DIR clients of the tinker SDK train adapters on MODEL and sample from "
    "them; what they save is kept in DIR. See docs/serving.md and docs/tinker.md.",
)
def serve(args: argparse.Namespace) -> int:
    if args.tinker is not None:
        return serve_tinker(args)
    from dora_rl.setup.tokenizer import open_tokenizer
    from dora_rl.weights.run_models import find_model, is_run

    folder = args.record.parent if args.record is not None else Path(".")
    template = args.chat_template
    require(
        *plain_checks(args),
        (folder.is_dir(), f"--record {args.record}: there is no directory {folder}"),
        (template is None or template.is_file(), f"--chat-template {template}: no such file"),
    )
    try:
        from dora_rl.serve.server import ModelServer, serve_until_signal
    except ImportError as error:
        raise UserError(f"{error}; install it with  pip install 'dora-rl[serve]'") from None
    found = find_model(args.model, args.version)
    watch = args.model if is_run(args.model) and args.version == "last" else None
    options = _serve_options(args, watch)
    server = ModelServer(options, found, open_tokenizer(found.directory, False), say)

    def ready(_: object) -> None:
        say(f"{found.label} as {options.name!r} at {server.url}")
        if options.api_keys and args.api_key_file is None and not os.environ.get(KEY_VARIABLE):
            say(f"API key (made for this start): {options.api_keys[0]}")

    serve_until_signal(server, ready)
    say("stopped")
    return 0


def _serve_options(args: argparse.Namespace, watch: Path | None) -> ServeOptions:
    from dora_rl.chat.http import HttpLimits
    from dora_rl.engine.options import EngineOptions
    from dora_rl.io.connection import is_loopback
    from dora_rl.serve.service import ServeOptions
    from dora_rl.setup.prepare import choose_device

    device = choose_device(args.device, "--device")
    keys = api_keys(args.api_key_file)
    if not keys and not is_loopback(args.host):
        keys = (secrets.token_urlsafe(24),)
    engine = EngineOptions(
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        context_max=args.context_max,
        versions_max=(args.versions_max or 3) if watch is not None else 1,
    )
    return ServeOptions(
        name=args.name or args.model.resolve().name,
        host=args.host,
        port=args.port,
        api_keys=keys,
        allowed_hosts=tuple(args.allowed_host),
        client_templates=args.client_templates,
        watch=watch,
        grace_s=args.grace_s,
        record=args.record,
        chat_template=args.chat_template.read_text() if args.chat_template is not None else None,
        num_threads=args.threads,
        engine=engine,
        requests_max=args.requests_max,
        sessions_max=args.sessions_max,
        session_idle_s_max=args.session_idle_s,
        http=HttpLimits(
            connections_max=args.connections_max, body_bytes_max=args.body_mib_max << 20
        ),
    )
