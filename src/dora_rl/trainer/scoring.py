"""Log-probs of documents under policies that do not move: sealed versions and the reference.

Never scores under weights in motion. Invariant: every log-prob handed out was computed from a
sealed version of the weight store (or the frozen reference), by the training engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dora_rl.ports import WeightStore
from dora_rl.trainer.documents import Document, collate
from dora_rl.trainer.lora import is_published_adapter, load_published_adapter, without_dropout
from dora_rl.trainer.model import Policy, load_weights
from dora_rl.trainer.packing import pack_stream
from dora_rl.types import UserError, Version


@torch.no_grad()
def score(
    policy: nn.Module,
    documents: Sequence[Document],
    temperature: float,
    pack_tokens: int,
    *,
    on_device: bool = False,
) -> list[Tensor]:
    """Log-probs of each document's trained tokens, in the documents' order; on the CPU, or left
    on the device for a pass that follows, so that nobody waits for them."""
    device = next(policy.parameters()).device
    packs, rest = pack_stream([d.num_tokens for d in documents], pack_tokens)
    out: list[Tensor] = []
    with without_dropout(policy):
        for indices in [*packs, rest]:
            if indices:
                pack = collate([documents[i] for i in indices], device)
                scores = policy(
                    pack.token_ids_T, pack.layout, pack.rows_N, pack.target_N, temperature
                )
                found = scores.logprobs_N
                out.extend(pack.split(found if on_device else found.cpu()))
    return out


class SealedScorer:
    """Holds up to `models_max` sealed versions as models, the least recently used goes first.

    Versions that are adapters share one twin of the base (`make_adapted`) and take turns on it.
    """

    def __init__(
        self,
        store: WeightStore | None,
        make_twin: Callable[[], Policy],
        make_adapted: Callable[[], Policy],
        temperature: float,
        pack_tokens: int,
        models_max: int = 2,
    ) -> None:
        self.store, self.make_twin, self.make_adapted = store, make_twin, make_adapted
        self.temperature, self.pack_tokens, self.models_max = temperature, pack_tokens, models_max
        self._models: OrderedDict[Version, Policy] = OrderedDict()
        self._adapted: Policy | None = None
        self._adapter: Version | None = None

    def hold_base(self) -> None:
        """Make the twin that adapters go on, where all ranks are sure to be."""
        self._adapted = self._adapted or self.make_adapted()

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
                self.pack_tokens,
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
        if self.store is None:
            raise UserError(
                "algorithm.old_logprobs other than 'rollout' recomputes under sealed versions: "
                "the learner needs a weight store"
            )
        sealed = self.store.open(version)
        if is_published_adapter(sealed):
            self.hold_base()
            assert self._adapted is not None
            load_published_adapter(self._adapted, sealed)
            self._adapter = version
            return self._adapted
        full = len(self._models) >= self.models_max
        model = self._models.popitem(last=False)[1] if full else self.make_twin()
        load_weights(model, sealed.tensor)
        self._models[version] = model
        return model
