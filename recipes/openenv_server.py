"""An OpenEnv server with a guessing game, for `openenv.toml`: its own classes, its own server.

    python recipes/openenv_server.py --port 8123

The first observation is the range, `1-7`. A message is a guess; the answer is `<` or `>`,
or the end. The last guess ends the game. Invariant: the same seed hides the same number.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

HIGHEST, GUESSES = 7, 3
SESSIONS_MAX = 4096


class Guess(Action):
    message: str


class Hint(Observation):
    message: str = ""


class GuessingGame(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._secret = random.Random(seed).randint(1, HIGHEST)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(message=f"1-{HIGHEST}\n")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        self._state.step_count += 1
        text = action.message.strip()
        if not text.isdecimal() or int(text) == self._secret:
            return Hint(done=True, reward=float(text.isdecimal()))
        if self._state.step_count == GUESSES:
            return Hint(done=True, reward=0.0)
        return Hint(message="<\n" if self._secret < int(text) else ">\n")

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A guessing game as an OpenEnv server.")
    parser.add_argument("--port", type=int, default=8123)
    app = create_fastapi_app(GuessingGame, Guess, Hint, max_concurrent_envs=SESSIONS_MAX)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
