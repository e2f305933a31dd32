"""A Hugging Face reward model, tiny and with random weights, from a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import ScoreError, ScoreItem
from dora_rl.rewards.model import ModelReward
from dora_rl.types import UserError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = {letter: n for n, letter in enumerate("#abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    place = tmp_path_factory.mktemp("model")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="#", unk_token="#"
    )
    fast.save_pretrained(place)
    config = transformers.Qwen2Config(
        vocab_size=64,  # loading adds special tokens
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=1,
        initializer_range=0.5,
    )
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(place)
    return place


def item(completion: str) -> ScoreItem:
    return ScoreItem("a prompt ", "a prompt ", completion)


def numbers(scores: list[float | ScoreError]) -> list[float]:
    assert not [score for score in scores if isinstance(score, ScoreError)], scores
    return [score for score in scores if not isinstance(score, ScoreError)]


def test_score_is_the_models_own_and_free_of_batch_mates(directory: Path) -> None:
    reward = ModelReward(RewardConfig(), directory.parent, path=directory.name, batch_items=2)
    texts = ["good", "a much longer response than that", "bad"]
    together = numbers(reward.score([item(text) for text in texts]))
    alone = [numbers(reward.score([item(text)]))[0] for text in texts]
    assert together == pytest.approx(alone, abs=1e-4)
    assert len(set(together)) == 3

    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        ids = tokenizer("a prompt good", return_tensors="pt")["input_ids"]
        expected = model(input_ids=ids).logits[0, 0].item()
    assert together[0] == pytest.approx(expected, abs=1e-4)


def test_squash(directory: Path) -> None:
    reward = ModelReward(RewardConfig(), Path("."), path=str(directory), squash=True)
    (score,) = numbers(reward.score([item("good")]))
    assert 0 < score < 1


def test_wrong_directory_and_label(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        ModelReward(RewardConfig(), Path("."), path=str(tmp_path))
    with pytest.raises(UserError, match="1 labels"):
        ModelReward(RewardConfig(), Path("."), path=str(directory), label=1)
