"""What models that do not move say of documents: sealed versions, reference, teacher, critic.

Never scores under weights in motion. Invariants: every log-prob handed out was computed from a
sealed version of the weight store (or the frozen reference or teacher), by the training engine; of
a mixture of experts, sealed versions go where the tokens went when they were sampled, as the policy
does, and reference and teacher go their own ways; old values are those of the critic at the
beginning of the step, before any of its updates; a teacher's token ids mean what the policy's do.
Where memory runs out, the same documents are scored in smaller packs, and whoever watches is told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dora_rl.out_of_memory import free_cached, maybe_fail
from dora_rl.ports import SealedWeights
from dora_rl.trainer import distributed
from dora_rl.trainer.documents import Document, Pack, collate, pack_stream
from dora_rl.trainer.memory import Room, noting_shortage
from dora_rl.trainer.policy.logprobs import TeacherLogits
from dora_rl.trainer.policy.lora import (
    is_published_adapter,
    load_published_adapter,
    without_dropout,
)
from dora_rl.trainer.policy.model import Critic, Policy, load_weights
from dora_rl.types import UserError, Version


@torch.no_grad()
def score(
    policy: Policy,
    documents: Sequence[Document],
    temperature: float,
    pack_tokens: int | Room,
    *,
    on_device: bool = False,
) -> list[Tensor]:
    """Log-probs of each document's trained tokens, in the documents' order; on the CPU, or left
    on the device for a pass that follows, so that nobody waits for them."""
    device = next(policy.parameters()).device

    def run(pack: Pack) -> Tensor:
        given = (pack.token_ids_P, pack.layout, pack.rows_T, pack.target_T, temperature)
        scores = policy(*given, experts_PLK=pack.experts_PLK)
        return scores.logprobs_T if on_device else scores.logprobs_T.cpu()

    with without_dropout(policy):
        return _in_packs(documents, pack_tokens, device, run)


@torch.no_grad()
def fill_old_values(critic: Critic, documents: Sequence[Document], pack_tokens: int | Room) -> None:
    """Values of every document under the critic as it is now."""

    def run(pack: Pack) -> Tensor:
        return critic(pack.token_ids_P, pack.layout, pack.rows_T).cpu()

    found = _in_packs(documents, pack_tokens, critic.head.device, run)
    for d, values in zip(documents, found, strict=True):
        d.old_values = values
    distributed.back_to_shards(critic)


class Teacher:
    """A frozen model that says how likely it finds what the policy wrote, or what it would have
    written in its place. Never trained, published or saved: a run that goes on reads it again."""

    def __init__(self, policy: Policy, temperature: float, room: Room, top_k: int = 0) -> None:
        self.policy, self._temperature = policy, temperature
        self._room, self._top_k = room, top_k

    def fill_logprobs(self, documents: Sequence[Document]) -> None:
        """Log-probs of the trained tokens of those that have none yet; they stay on the device."""
        unscored = [d for d in documents if d.teacher_logprobs is None]
        found = score(self.policy, unscored, self._temperature, self._room, on_device=True)
        for d, logprobs in zip(unscored, found, strict=True):
            d.teacher_logprobs = logprobs

    @torch.no_grad()
    def logits(self, pack: Pack) -> TeacherLogits:
        """Its distribution at every row that predicts a trained token, beside the policy's."""
        states_TH = self.policy.states(pack.token_ids_P, pack.layout).index_select(0, pack.rows_T)
        return TeacherLogits(states_TH, self.policy.output(), self._top_k)


def _in_packs(
    documents: Sequence[Document],
    pack_tokens: int | Room,
    device: torch.device,
    run: Callable[[Pack], Tensor],
) -> list[Tensor]:
    """What `run` makes of each document, in their order. Nothing that it does is left behind by a
    pack that did not fit, so the pack alone is run again, smaller. Ranks that compute together
    cannot go back alone."""
    room = _room(pack_tokens)
    out: list[Tensor] = []
    while len(out) < len(documents):
        left = documents[len(out) :]
        packs, rest = pack_stream([d.num_tokens for d in left], room.pack_tokens)
        for indices in [*packs, *([rest] if rest else [])]:
            some = [left[i] for i in indices]
            with noting_shortage(may_recover=distributed.world()[1] == 1) as missing:
                maybe_fail("score")
                pack = collate(some, device)
                out += pack.split(run(pack))
            if missing:
                room.shrink_scored([d.num_tokens for d in some], missing[0])
                free_cached()
                break
    return out


def _room(pack_tokens: int | Room) -> Room:
    return Room(pack_tokens) if isinstance(pack_tokens, int) else pack_tokens


class SealedScorer:
    """Holds up to `models_max` sealed versions as models, the least recently used goes first.

    Versions that are adapters share one twin of the base (`make_adapted`) and take turns on it.
    """

    def __init__(
        self,
        open_version: Callable[[Version], SealedWeights] | None,
        make_twin: Callable[[], Policy],
        make_adapted: Callable[[], Policy],
        temperature: float,
        pack_tokens: int | Room,
        models_max: int = 2,
    ) -> None:
        self.make_twin, self.make_adapted, self._open = make_twin, make_adapted, open_version
        self.temperature, self.models_max = temperature, models_max
        self.room = _room(pack_tokens)
        self._models: OrderedDict[Version, Policy] = OrderedDict()
        self._adapted: Policy | None = None
        self._adapter: Version | None = None

    def hold_base(self) -> None:
        """Make the twin that adapters go on, where all ranks are sure to be."""
        if self._adapted is None:
            maybe_fail("twin")
            self._adapted = self.make_adapted()

    def score(
        self,
        documents: Sequence[Document],
        versions: Sequence[Version],
        *,
        on_device: bool = False,
    ) -> list[Tensor]:
        """`documents[i]` under version `versions[i]`."""
        out: dict[int, Tensor] = {}
        for version in sorted(set(versions)):
            mine = [i for i, v in enumerate(versions) if v == version]
            found = score(
                self._model(version),
                [documents[i] for i in mine],
                self.temperature,
                self.room,
                on_device=on_device,
            )
            out.update(zip(mine, found, strict=True))
        return [out[i] for i in range(len(documents))]

    def release(self) -> None:
        """Forget every model, where their memory is needed for something else."""
        self._models.clear()
        self._adapted = self._adapter = None

    def _model(self, version: Version) -> Policy:
        if version in self._models:
            self._models.move_to_end(version)
            return self._models[version]
        if self._adapted is not None and version == self._adapter:
            return self._adapted
        if self._open is None:
            raise UserError(
                "algorithm.old_logprobs other than 'rollout' recomputes under sealed versions: "
                "the learner needs a weight store"
            )
        sealed = self._open(version)
        if is_published_adapter(sealed):
            self.hold_base()
            assert self._adapted is not None
            load_published_adapter(self._adapted, sealed)
            self._adapter = version
            return self._adapted
        full = len(self._models) >= self.models_max
        model = self._models.popitem(last=False)[1] if full else self._twin()
        load_weights(model, sealed.tensor)
        self._models[version] = model
        return model

    def _twin(self) -> Policy:
        """Where there is no room for another, the least recently used one is loaded anew."""
        with noting_shortage(bool(self._models) and distributed.world()[1] == 1) as missing:
            maybe_fail("twin")
            return self.make_twin()
        self.models_max = len(self._models)
        self.room.tell(
            f"out of memory for another frozen version ({missing[0]}); at most {self.models_max} "
            "at a time from now on"
        )
        free_cached()
        return self._models.popitem(last=False)[1]
