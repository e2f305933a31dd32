"""The light tokenizer gives what transformers gives; where that is not certain it is not used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.setup.tokenizer import LightTokenizer, open_tokenizer
from dora_rl.types import UserError
from tests.kit.places import MODEL

TEXTS = ("03:274\n", "02:746\n01:463\n00:637\n=637", "=", "0 1", "x?")


def test_same_tokens_and_text_as_transformers() -> None:
    from transformers import AutoTokenizer

    light, whole = open_tokenizer(MODEL, False), AutoTokenizer.from_pretrained(MODEL)
    assert isinstance(light, LightTokenizer)
    for text in TEXTS:
        for special in (True, False):
            ids = light.encode(text, add_special_tokens=special)
            assert list(ids) == whole.encode(text, add_special_tokens=special)
        ids = [*light.encode(text), 1]
        for skip in (True, False):
            assert light.decode(ids, skip) == whole.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": "03:274\n"}]
    asked = {"tokenize": False, "add_generation_prompt": True}
    assert light.apply_chat_template(messages, **asked) == whole.apply_chat_template(
        messages, **asked
    )


TEMPLATE = (
    "{%- for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}\n"
    "{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}"
    "{{ pad_token }}{{ bos_token is defined }}"
)
TURNS = (
    [{"role": "user", "content": " 2 + 2? "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é {{ x }}"}],
    [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4 is"}],
)


@pytest.mark.parametrize("special", [{}, {"bos_token": "<eos>"}, {"bos_token": None}])
def test_a_template_is_rendered_as_transformers_does(
    tmp_path: Path, special: dict[str, str | None]
) -> None:
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | special))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    light, whole = open_tokenizer(model, False), AutoTokenizer.from_pretrained(model)
    for turns in TURNS:
        for asked in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
        ):
            ours = light.apply_chat_template(turns, tokenize=False, **asked)
            assert ours == whole.apply_chat_template(turns, tokenize=False, **asked)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for more in (
        {"tools": tools, "chat_template": "{{ tools | tojson }}"},
        {"thinking": False, "chat_template": "{{ thinking }}{{ eos_token }}"},
        {"eos_token": "mine"},
    ):
        asked = {"tokenize": False, "add_generation_prompt": True, **more}
        ours = light.apply_chat_template(TURNS[0], **asked)
        assert ours == whole.apply_chat_template(TURNS[0], **asked)
    assert "_whole" not in vars(light), "the whole tokenizer was loaded"
    assert light.apply_chat_template(TURNS[0], tokenize=True, return_dict=False)
    assert "_whole" in vars(light)


def test_settings_that_change_the_tokens_call_for_transformers(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True}))
    assert not isinstance(open_tokenizer(tmp_path / "model", False), LightTokenizer)


@pytest.mark.parametrize("light", [True, False])
def test_an_empty_tokenizer_is_one_line(tmp_path: Path, light: bool) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    if not light:
        (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.path: .*tokenizer") as error:
        open_tokenizer(tmp_path / "model", False)
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        open_tokenizer(tmp_path / "model", False)


def test_preparing_a_run_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import dora_rl.worlds.local\n"
        "from dora_rl.setup.prepare import prepare\n"
        "from dora_rl.setup.settings import load_config\n"
        "prepare(load_config(Path('recipes/quickstart.toml'), ['runtime.device=cpu']))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    root = MODEL.parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
