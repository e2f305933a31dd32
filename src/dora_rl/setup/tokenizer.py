"""The controller's tokenizer: the `tokenizers` library alone where that is enough.

Importing all of transformers takes seconds, and the controller needs that only for tokenizers that
exist as Python code; for chat templates its renderer is enough. Invariant: `encode`, `decode` and
the text of a template are what transformers' `AutoTokenizer` gives; where that is not certain from
the files, `AutoTokenizer` is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dora_rl.types import UserError
from dora_rl.user_code import one_line

# Classes that are nothing but their tokenizer.json.
PLAIN_CLASSES = {
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
}
# Settings by which transformers changes what tokenizer.json says.
CHANGES = ("add_bos_token", "add_eos_token", "auto_map", "clean_up_tokenization_spaces")
# What a template cannot be asked for without the tokenizer itself; all else is for the template.
WHOLE_OPTIONS = {"return_assistant_tokens_mask", "return_dict", "return_tensors", "padding"}
WHOLE_OPTIONS |= {"truncation", "max_length", "tokenizer_kwargs"}


class LightTokenizer:
    """What data and rewards ask of a tokenizer (`data.prompts.Tokenizer`, and `decode`)."""

    def __init__(self, path: Path, settings: dict[str, Any], trust_remote_code: bool) -> None:
        from tokenizers import Tokenizer

        self._path, self._trust = path, trust_remote_code
        try:
            self._light = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing more special
            raise UserError(
                f"model.path: {path / 'tokenizer.json'} is no tokenizer ({one_line(error)}); "
                "copy the file from the model again"
            ) from error
        self._specials = _special_tokens(path, settings)
        template = path / "chat_template.jinja"
        self.chat_template = settings.get("chat_template") or (
            template.read_text() if template.is_file() else None
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return self._light.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._light.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        is_text = options.get("tokenize") is False and not options.keys() & WHOLE_OPTIONS
        template = options.get("chat_template", self.chat_template)
        if not is_text or self._specials is None or not isinstance(template, str):
            return self._whole.apply_chat_template(conversation, **options)
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {name: value for name, value in options.items() if name != "tokenize"}
        options = {**self._specials, **options, "chat_template": template}
        rendered, _ = render_jinja_template([conversation], **options)
        return rendered[0]

    @cached_property
    def _whole(self) -> Any:
        return _auto_tokenizer(self._path, self._trust)


def open_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a model directory, or one line that says what is missing."""
    settings = _read_json(path / "tokenizer_config.json")
    plain = settings.get("tokenizer_class") in PLAIN_CLASSES
    if plain and (path / "tokenizer.json").is_file() and not any(map(settings.get, CHANGES)):
        _read_json(path / "tokenizer.json")  # a damaged file gets its line here
        return LightTokenizer(path, settings, trust_remote_code)
    return _auto_tokenizer(path, trust_remote_code)


def _special_tokens(path: Path, settings: dict[str, Any]) -> dict[str, str] | None:
    """What templates know by name; None: other files have their say."""
    if (path / "special_tokens_map.json").exists() or (path / "added_tokens.json").exists():
        return None
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _auto_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (Exception, SystemExit) as error:
        # A damaged file makes it raise anything, and so may the model's own code.
        raise UserError(f"model.path: no tokenizer in {path} ({one_line(error)})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text()) if path.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model.path: {path} is damaged ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"model.path: {path} is not an object")
    return data
