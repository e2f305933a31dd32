"""Rewards: from finished responses to numbers. `base` is the door; see docs/rewards.md."""
