"""Play an episode by hand, without a model: for trying an environment out and for its tests.

    play(Calculator(), Row("47+86\\n", answer="133"), ["47+86?", "=133"])

Never tokenizes anything. The observations come in the order of the turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dora_rl.envs.base import Environment, Observation, Row, Turn


def play(
    environment: Environment, row: Row, turns: Sequence[str], seed: int = 0
) -> list[Observation]:
    """Reset, then one step for each text, until the episode is done."""
    return asyncio.run(_play(environment, row, turns, seed))


async def _play(
    environment: Environment, row: Row, turns: Sequence[str], seed: int
) -> list[Observation]:
    opening = await _value(environment.reset(row, seed))
    found: list[Observation] = [opening] if environment.opens else []
    for number, text in enumerate(turns, 1):
        found.append(await _value(environment.step(Turn(text, number=number))))
        if found[-1].done:
            break
    environment.close()
    return found


async def _value(found: Any) -> Any:
    return await found if hasattr(found, "__await__") else found
