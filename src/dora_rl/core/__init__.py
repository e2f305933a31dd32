"""Decisions only: `step(state, event, now) -> actions`.

Nothing in this package performs I/O, reads a clock, draws random numbers, logs, or imports
asyncio or torch. The same state and the same events always give the same actions, which is what
makes replay, resume and the simulator possible.
"""
