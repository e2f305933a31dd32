"""`dora-rl serve --tinker DIR`: training and sampling for clients of the public `tinker` SDK, over
one frozen base. See `docs/tinker.md`."""

SDK_VERSION = "0.38.0"  # of the SDK on PyPI that this speaks with, and is tested against
