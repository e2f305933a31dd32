"""docs/rewards.md is complete. (Its blocks are run by tests/docs.)"""

from __future__ import annotations

from tests.kit.places import ROOT

TEXT = (ROOT / "docs" / "rewards.md").read_text()


def test_every_built_in_and_its_options_are_documented() -> None:
    import inspect

    from dora_rl.rewards import builtin
    from dora_rl.rewards.code import CodeReward
    from dora_rl.rewards.judge import JudgeReward
    from dora_rl.rewards.model import ModelReward

    makers = {
        **builtin.SCORERS,
        "code": CodeReward,
        "judge": JudgeReward,
        "model": ModelReward,
    }
    for name, maker in makers.items():
        assert f"`{name}`" in TEXT
        for option in inspect.signature(maker).parameters.values():
            if option.kind is option.KEYWORD_ONLY:
                assert f"`{option.name}`" in TEXT, (name, option.name)
