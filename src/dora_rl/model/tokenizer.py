"""What is asked of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Those of transformers and `setup.tokenizer` have it. Not all have a template or an end of
    sequence: `chat_template` and `eos_token_id` are looked up where they are used."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
