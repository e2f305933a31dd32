"""Generation engines. `dora_rl.engine.engine.Engine` is the native one.

This package file imports nothing, so that the pure parts (sequence, blocks, scheduler, spec,
options) can be used without torch.
"""
