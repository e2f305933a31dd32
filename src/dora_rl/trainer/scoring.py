"""Log-probs of documents under policies that do not move: sealed versions and the reference.

Never scores under weights in motion. Invariant: every log-prob handed out was computed from a
sealed version of the weight store (or the frozen reference), by the training engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dora_rl.ports import SealedWeights, WeightStore
from dora_rl.trainer.documents import Document, collate
from dora_rl.trainer.model import Policy, load_weights
from dora_rl.trainer.packing import pack_stream
from dora_rl.types import UserError, Version


@torch.no_grad()
def score(
    policy: nn.Module, documents: Sequence[Document], temperature: float, pack_tokens: int
) -> list[Tensor]:
    """Log-probs of each document's trained tokens, on the CPU, in the documents' order."""
    device = next(policy.parameters()).device
    packs, rest = pack_stream([d.num_tokens for d in documents], pack_tokens)
    out: list[Tensor] = []
    for indices in [*packs, rest]:
        if indices:
            pack = collate([documents[i] for i in indices], device)
            scores = policy(pack.token_ids_T, pack.layout, pack.rows_N, pack.target_N, temperature)
            out.extend(pack.split(scores.logprobs_N))
    return out


class SealedScorer:
    """Holds up to `models_max` sealed versions as models, the least recently used goes first."""

    def __init__(
        self,
        store: WeightStore | None,
        make_twin: Callable[[], Policy],
        temperature: float,
        pack_tokens: int,
        reader: Callable[[SealedWeights], Callable[[str], Tensor]] = lambda sealed: sealed.tensor,
        models_max: int = 2,
    ) -> None:
        self._reader = reader
        self.store, self.make_twin = store, make_twin
        self.temperature, self.pack_tokens, self.models_max = temperature, pack_tokens, models_max
        self._models: OrderedDict[Version, Policy] = OrderedDict()

    def score(self, documents: Sequence[Document], versions: Sequence[Version]) -> list[Tensor]:
        """`documents[i]` under version `versions[i]`."""
        out: dict[int, Tensor] = {}
        for version in sorted(set(versions)):
            mine = [i for i, v in enumerate(versions) if v == version]
            found = score(
                self._model(version),
                [documents[i] for i in mine],
                self.temperature,
                self.pack_tokens,
            )
            out.update(zip(mine, found, strict=True))
        return [out[i] for i in range(len(documents))]

    def release(self) -> None:
        """Forget every model, where their memory is needed for something else."""
        self._models.clear()

    def _model(self, version: Version) -> Policy:
        if version in self._models:
            self._models.move_to_end(version)
            return self._models[version]
        if self.store is None:
            raise UserError(
                "algorithm.old_logprobs other than 'rollout' recomputes under sealed versions: "
                "the learner needs a weight store"
            )
        full = len(self._models) >= self.models_max
        model = self._models.popitem(last=False)[1] if full else self.make_twin()
        load_weights(model, self._reader(self.store.open(version)))
        self._models[version] = model
        return model
