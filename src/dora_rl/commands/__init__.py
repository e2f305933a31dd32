"""One file per command of `dora-rl`: `SUMMARY`, `add_arguments(parser)` and `run(args)`.

A command reads its arguments, calls the library and prints. It imports what it needs inside `run`,
so that `dora-rl --help` stays fast.
"""
