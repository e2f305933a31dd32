"""What goes wrong in a simulated run, drawn from a seed. At rates of zero that is nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from dora_rl.types import RequestId


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Which faults a swarm member has, and how often (per opportunity, or mean seconds between)."""

    load: float = 0.0
    move: float = 0.0
    sample: float = 0.0
    score: float = 0.0
    delay_s: float = 0.0
    duplicate: float = 0.0
    death_every_s: float = 0.0
    freeze_every_s: float = 0.0
    slow_every_s: float = 0.0
    trainer_death_every_s: float = 0.0
    controller_death_every_s: float = 0.0
    poison: float = 0.0  # of all prompts
    kills: float = 0.0  # of all prompts
    still: float = 0.0
    stall_every_s: float = 0.0
    host_loss_every_s: float = 0.0
    restart_s: tuple[float, float] = (5.0, 5.0)  # at least, at most

    @staticmethod
    def swarm(rng: random.Random) -> FaultRates:
        """Each kind of fault is present in about half of the seeds (swarm testing)."""

        def some(low: float, high: float) -> float:
            return rng.uniform(low, high) if rng.random() < 0.5 else 0.0

        return FaultRates(
            load=some(0.02, 0.3),
            move=some(0.02, 0.4),
            sample=some(0.001, 0.05),
            score=some(0.005, 0.1),
            delay_s=some(0.01, 3.0),
            duplicate=some(0.01, 0.2),
            death_every_s=some(20, 200),
            freeze_every_s=some(40, 300),
            slow_every_s=some(20, 200),
            trainer_death_every_s=some(30, 300),
            controller_death_every_s=some(40, 400),
            poison=some(0.01, 0.1),
            kills=some(0.01, 0.05),
            still=some(0.001, 0.02),
            stall_every_s=some(40, 300),
            restart_s=(1, 20),
        )


@dataclass
class Faults:
    """Faults at the given rates until `calm` is set; from then on no new ones."""

    rates: FaultRates = FaultRates()
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    calm: bool = False

    def __post_init__(self) -> None:
        self.seed = self.rng.randrange(2**32)

    def _happens(self, rate: float) -> bool:
        return not self.calm and rate > 0 and self.rng.random() < rate

    def load_fails(self) -> str | None:
        return "checksum mismatch" if self._happens(self.rates.load) else None

    def move_fails(self) -> str | None:
        kinds = ("lost on the way", "connection reset")
        return kinds[self.rng.random() >= 0.5] if self._happens(self.rates.move) else None

    def sample_fails(self) -> str | None:
        return "non-finite logits" if self._happens(self.rates.sample) else None

    def _draw(self, what: str, prompt: int) -> random.Random:
        """The same for a prompt each time: what is wrong with it stays, when all else is calm."""
        return random.Random(f"{self.seed} {what} {prompt}")

    def poison(self, prompt: int) -> str | None:
        """Why the reward of this prompt always fails, if it does."""
        rate = self.rates.poison
        return "raised KeyError" if rate and self._draw("poison", prompt).random() < rate else None

    def kills_at(self, prompt: int, sample: int) -> int | None:
        """The token at which this sample ends the process of whoever decodes it, if it does."""
        if not self.rates.kills:
            return None
        draw = self._draw("kills", prompt)
        return draw.choice([0, 3, 70]) if draw.random() < self.rates.kills else None

    def is_bad(self, prompt: int) -> bool:
        """Is it the prompt's own fault if its groups fail?"""
        return self.poison(prompt) is not None or self.kills_at(prompt, 0) is not None

    def stands_still(self) -> bool:
        """Is this placement of a request forgotten by its instance?"""
        return self._happens(self.rates.still)

    def score(self, request: RequestId, attempt: int) -> str | None:
        """None: scored; "hang": no answer; "nan": not a number; anything else: an error."""
        kinds = ["hang", "nan", "raised ValueError"]
        return self.rng.choice(kinds) if self._happens(self.rates.score) else None

    def restart_s(self) -> float:
        """How long a restart takes."""
        return self.rng.uniform(*self.rates.restart_s)

    def delay_s(self) -> float:
        """How late a message reaches the controller."""
        mean_s = 0.0 if self.calm else self.rates.delay_s
        return self.rng.expovariate(1 / mean_s) if mean_s else 0.0

    def again_s(self) -> float | None:
        """How much later this message arrives a second time; None: it does not. Soon, or when its
        sender and its order may long be others."""
        if not self._happens(self.rates.duplicate):
            return None
        return self.rng.choice([0.1, 1.0, self.rng.uniform(2, 20), self.rng.uniform(20, 90)])
