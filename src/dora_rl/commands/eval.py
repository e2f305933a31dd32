"""`dora-rl eval RUN_OR_MODEL`: held-out accuracy of one version, greedy, sampled and pass@k.

Exit status: 0 there are scores, 1 too many answers failed (`evaluation.failed_share_max`) and there
is none, 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dora_rl.commands.arguments import (
    JSON,
    MODEL,
    argument,
    check_least,
    prepare_output,
    write_json,
)
from dora_rl.types import UserError
from dora_rl.user_code import listen, origin_of, trace_of

TRACES_MAX = 3  # tracebacks of the user's code that are shown
SUMMARY = "evaluate a run's weights or a model on held-out prompts"


ARGUMENTS = (
    MODEL,
    argument("overrides", nargs="*", default=[], help="section.key=value of the configuration"),
    argument("--config", type=Path, help="data, reward and sampling (default: those of the run)"),
    argument("--step", default="last", metavar="N|best|last", help="which weights"),
    argument("--num-prompts", type=int, metavar="N", help="held-out prompts"),
    argument("--samples", type=int, metavar="K", help="sampled answers per prompt"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.observe.eval_figures import TAIL_FILE, failed_text, has_failed
    from dora_rl.setup.settings import load_config
    from dora_rl.weights.run_models import find_model, is_run
    from dora_rl.worlds.evaluate_once import evaluate_once

    prepare_output(args.json)
    check_least(args, 1, "num_prompts", "samples")
    found = find_model(args.model, args.step)
    if args.config is None and not is_run(args.model):
        raise UserError(f"{args.model} is a model; add --config FILE.toml with data and reward")
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
    print(found.label)
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"  {name:14} {value:.4g}")
    write_json(args.json, {"model": found.label, "version": found.version, **figures})
    for trace in list(traces.values())[:TRACES_MAX]:
        print(trace, file=sys.stderr)
    if text := failed_text(figures):
        print(f"{'failed' if has_failed(figures) else 'note'}: {text}")
    return 1 if has_failed(figures) else 0
