"""One response with its prompt, ready to be packed; and a pack of them as tensors.

Invariant: `rows[i]` is the position whose output predicts the i-th trained token, and every
per-token tensor of a document has one entry per trained token, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora_rl.trainer.attention.layout import Layout, send
from dora_rl.types import Group, GroupId, Trajectory, Version


@dataclass(slots=True)
class Document:
    """Mutable on purpose: scores of other policies are filled in when they become known."""

    token_ids: Tensor  # (n,) prompt and response
    rows: Tensor  # (m,) positions that predict a trained token
    rollout_logprobs: Tensor  # (m,)
    reward: float
    version: Version
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    group: GroupId = 0
    truncated: bool = False  # it was cut off at the limit of tokens
    # (m,) of a response that was decoded under several versions (the `partial` baseline); None:
    # `version` throughout.
    mixed_versions: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_trained(self) -> int:
        return self.rows.shape[0]

    @property
    def mixed(self) -> bool:
        return self.mixed_versions is not None

    def versions(self) -> Tensor:
        """The version that sampled each trained token."""
        if self.mixed_versions is not None:
            return self.mixed_versions
        return torch.full((self.num_trained,), self.version, dtype=torch.int64)


def document_of(group: Group, sample: Trajectory, reward: float) -> Document:
    """The document of one admitted sample."""
    start = len(group.prompt_ids)
    place = np.flatnonzero(sample.loss_mask)
    token_ids = np.concatenate([group.prompt_ids, sample.token_ids], dtype=np.int64)
    return Document(
        token_ids=torch.from_numpy(token_ids),
        rows=torch.from_numpy(place + (start - 1)),
        rollout_logprobs=torch.from_numpy(sample.logprobs[place]),
        reward=reward,
        version=group.version,
        group=group.id,
        truncated=sample.truncated,
        mixed_versions=_mixed_versions(sample, place),
    )


def _mixed_versions(sample: Trajectory, place: NDArray[np.int64]) -> Tensor | None:
    if not sample.mixed:
        return None
    starts, versions = np.array(sample.segments, np.int64).T
    return torch.from_numpy(versions[np.searchsorted(starts, place, side="right") - 1])


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents side by side. T tokens, N trained ones, `sequence_N` their document."""

    documents: tuple[Document, ...]
    token_ids_T: Tensor
    layout: Layout
    rows_N: Tensor
    target_N: Tensor
    sequence_N: Tensor

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def num_trained(self) -> int:
        return self.rows_N.shape[0]

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor per document, side by side on the pack's device. Parts may be there already:
        bringing them back to the host first would make it wait for the device."""
        device = self.token_ids_T.device
        if all(p.device.type == "cpu" for p in parts):
            return send(torch.cat(list(parts)), device)
        return torch.cat([p if p.device == device else send(p, device) for p in parts])

    def split(self, values_N: Tensor) -> list[Tensor]:
        """Back to one tensor per document, where the values are."""
        return list(values_N.detach().split([d.num_trained for d in self.documents]))


def collate(documents: Sequence[Document], device: torch.device) -> Pack:
    """Put documents side by side; nothing is padded."""
    layout = Layout([d.num_tokens for d in documents], device)
    token_ids = torch.cat([d.token_ids for d in documents])
    counts = torch.tensor([d.num_trained for d in documents])
    starts = torch.tensor(layout.starts).repeat_interleave(counts)
    rows = torch.cat([d.rows for d in documents]) + starts
    return Pack(
        documents=tuple(documents),
        token_ids_T=send(token_ids, device),
        layout=layout,
        rows_N=send(rows, device),
        target_N=send(token_ids[rows + 1], device),
        sequence_N=send(torch.repeat_interleave(counts), device),
    )
