"""`dora-rl`: one program, whose commands are in `dora_rl.commands`.

A mistake of the user ends in one line on stderr and exit status 2; `--debug` shows the traceback.
Never does any work itself. To add a command, write it there and enter it in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dora_rl import __version__
from dora_rl.commands import COMMANDS
from dora_rl.commands.arguments import argument
from dora_rl.io.system_errors import system_line
from dora_rl.types import UserError
from dora_rl.user_code import hint

PIPE_CLOSED = 141  # as a program that is ended by SIGPIPE
DEBUG = argument("--debug", action="store_true", help="show the traceback of an error")


class _Parser(argparse.ArgumentParser):
    """Errors as one line, with the nearest name for a misspelt option."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def option_names(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


def build_parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="dora-rl",
        description="Reinforcement-learning post-training with multi-version streaming rollout.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dora-rl {__version__}")
    chooser = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    parsers: dict[str, _Parser] = {}
    for name, command in COMMANDS.items():
        parsers[name] = one = chooser.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog=command.about,
            allow_abbrev=False,
        )
        for names, options in (*command.arguments, DEBUG):
            one.add_argument(*names, **options)
    return parser, parsers


def _parse(argv: Sequence[str]) -> argparse.Namespace | None:
    """The arguments, or None when there is no command and the help was printed."""
    parser, parsers = build_parser()
    first = next(iter(argv), None)
    if first is None:
        parser.print_help()
        return None
    if not first.startswith("-") and first not in COMMANDS:
        raise UserError(f"unknown command {first!r}{hint(first, COMMANDS)}")
    args, extra = parser.parse_known_args(argv)
    if hasattr(args, "overrides"):  # argparse leaves those that follow an option behind
        late = [word for word in extra if "=" in word and not word.startswith("-")]
        args.overrides = [*args.overrides, *late]
        extra = [word for word in extra if word not in late]
    if extra:
        option = extra[0].partition("=")[0]
        known = parsers[args.command].option_names() if args.command else parser.option_names()
        near = hint(option, known) if option.startswith("--") else ""
        raise UserError(f"unknown argument {extra[0]!r}{near}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: fine, 1: it found something, 2: the input is wrong."""
    argv = sys.argv[1:] if argv is None else argv

    def work() -> int:
        args = _parse(argv)
        return COMMANDS[args.command].run(args) if args is not None else 0

    return while_read(lambda: in_one_line(work, debug="--debug" in argv))


def while_read(work: Callable[[], int]) -> int:
    """A reader of our output that is gone ends the program, and is no error."""
    try:
        status = work()
        sys.stdout.flush()  # here, not at the interpreter's end, where nobody could catch it
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Whoever read our output has enough, as `head` has. What is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


def _reader_is_gone() -> bool:
    """Whether nobody reads the standard output; any other pipe is no reason to be quiet."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # it is no file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def in_one_line(work: Callable[[], int], *, debug: bool) -> int:
    """Mistakes of the user and refusals of the machine are one line; `debug`: the traceback."""
    try:
        return work()
    except UserError as error:
        if debug:
            raise
        return _tell(str(error))
    except KeyboardInterrupt:
        print("dora-rl: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = system_line(error)
        if debug or line is None:
            raise
        return _tell(line)


def _tell(text: str) -> int:
    print(f"dora-rl: error: {' '.join(text.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
