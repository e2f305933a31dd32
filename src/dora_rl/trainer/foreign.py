"""Any causal language model transformers can load, behind the decoder's interface.

The fallback for architectures the lean decoder does not know. Documents are packed into one row;
transformers masks them apart from their restarting positions. Never trusts remote code unless told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dora_rl.trainer.attention_layout import Layout
from dora_rl.trainer.logprobs import TokenScores, chunk_tokens, token_scores
from dora_rl.trainer.options import TrainerOptions
from dora_rl.types import UserError


class ForeignPolicy(nn.Module):
    """transformers' own model; `inner` is it, unchanged."""

    def __init__(
        self, directory: Path, device: torch.device, dtype: torch.dtype, options: TrainerOptions
    ) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(directory),
                dtype=torch.float32,
                trust_remote_code=options.trust_remote_code,
                attn_implementation="sdpa",
            )
        except (ValueError, OSError) as error:
            line = str(error).strip().splitlines()[0]
            raise UserError(f"model '{directory}': transformers cannot load it ({line})") from error
        self.inner = model.to(device)
        self.compute_dtype = dtype
        self.chunk_tokens = options.logits_chunk_tokens
        self.vocab = int(model.config.vocab_size)
        self.hidden = int(model.config.hidden_size)
        self.positions_max = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        self._checkpointing = False
        if options.activation_checkpointing == "layer":
            self.checkpointing = True

    @property
    def checkpointing(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self._checkpointing = on
        if on:
            self.inner.gradient_checkpointing_enable()
        else:
            self.inner.gradient_checkpointing_disable()

    def forward(
        self,
        token_ids_T: Tensor,
        layout: Layout,
        rows_N: Tensor,
        target_N: Tensor,
        temperature: float = 1.0,
    ) -> TokenScores:
        """Scores of `target_N[i]` as the token after row `rows_N[i]` of the pack."""
        states = self.states(token_ids_T, layout).index_select(0, rows_N)
        weight = self.inner.get_output_embeddings().weight
        chunk = chunk_tokens(self.vocab, states.device, self.chunk_tokens)
        return token_scores(states, weight, target_N, temperature, chunk)

    def states(self, token_ids_T: Tensor, layout: Layout) -> Tensor:
        """The final states (T, hidden) of every token of the pack."""
        with torch.autocast(
            token_ids_T.device.type,
            dtype=self.compute_dtype,
            enabled=self.compute_dtype != torch.float32,
        ):
            out = self.inner.base_model(
                input_ids=token_ids_T[None], position_ids=layout.position_T[None], use_cache=False
            )
        return out.last_hidden_state[0].to(self.compute_dtype)
