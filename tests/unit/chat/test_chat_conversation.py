"""A conversation keeps the ids a model made, even where its text would be tokenised otherwise."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dora_rl.chat.conversation import ChatTemplate, Conversation
from dora_rl.chat.requests import ApiError, read_chat
from dora_rl.chat.texts import PlainTexts, next_turn

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = 1


@pytest.fixture(scope="module")
def tokenizer():
    """Byte pairs: `ab` is one token when it is read, but a model may as well write `a`, `b`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|im_start|>", "<|im_end|>", *letters, "ab"]
    vocab = {word: index for index, word in enumerate(words)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", chat_template=CHATML
    )


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


def turn_of(past, messages, template, tools=()):
    ask = read_chat({"model": "m", "messages": messages, "tools": list(tools)}, "s")
    return asyncio.run(next_turn(past, ask, {}, PlainTexts(template), {END}))


def test_earlier_ids_are_kept_as_they_were_generated(tokenizer):
    template, past = ChatTemplate(tokenizer), Conversation()
    a, b, ab = tokenizer.convert_tokens_to_ids(["a", "b", "ab"])
    assert tokenizer.encode("ab") == [ab], "the test needs a text with two tokenisations"
    first = turn_of(past, [user("x")], template)
    past.add(first, [a, b, END], [-1.0, -2.0, -3.0], reply("ab"))
    second = turn_of(past, [user("x"), reply("ab"), user("y")], template)
    assert second.continued and second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert second.prompt_ids[len(first.prompt_ids) :][:3] == (a, b, END)
    assert (
        tokenizer.decode(second.new_ids)
        == "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    )
    past.add(second, [a], [-1.0], reply("a"))
    assert past.loss_mask == [1, 1, 1, *[0] * len(second.new_ids), 1]
    assert len(past.logprobs) == len(past.token_ids) == len(past.loss_mask)


def test_a_reply_that_was_cut_off_is_closed(tokenizer):
    template, past = ChatTemplate(tokenizer), Conversation()
    (a,) = tokenizer.convert_tokens_to_ids(["a"])
    past.add(turn_of(past, [user("x")], template), [a], [-1.0], reply("a"))
    second = turn_of(past, [user("x"), reply("a"), user("y")], template)
    assert second.continued and second.new_ids[0] == END


def test_a_history_that_differs_starts_afresh_and_says_where(tokenizer):
    template, past = ChatTemplate(tokenizer), Conversation()
    (a,) = tokenizer.convert_tokens_to_ids(["a"])
    past.add(turn_of(past, [user("x")], template), [a, END], [-1.0, -1.0], reply("a"))
    for messages, words in (
        ([user("other"), reply("a"), user("y")], "message 0"),
        ([user("x"), reply("A"), user("y")], "message 1"),
        ([user("x")], "do not go on"),
        ([user("x"), reply("a"), reply("b")], "an assistant message"),
    ):
        turn = turn_of(past, messages, template)
        assert not turn.continued and words in turn.why
        assert turn.prompt_ids == template.prompt_ids(messages, (), {})
    again = turn_of(past, [user("new")], template)
    past.add(again, [a], [-1.0], reply("a"))
    assert past.num_turns == 1 and past.prompt_ids == again.prompt_ids


def test_messages_come_back_as_clients_write_them(tokenizer):
    """`message.model_dump()` of the openai client has many nulls; parts are joined."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    dumped = {"role": "assistant", "content": None, "refusal": None, "audio": None}
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    messages = [{"role": "user", "content": parts}, dumped | {"tool_calls": [call]}]
    assert list(read_chat({"model": "m", "messages": messages}, None).messages) == [
        user("xy"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def test_tools_reach_the_template_and_its_refusal_is_the_clients_error(tokenizer):
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    ids = ChatTemplate(tokenizer).prompt_ids([user("x")], [tool], {})
    assert "1 tools" in tokenizer.decode(ids)
    picky = ChatTemplate(tokenizer, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ApiError, match="roles must alternate"):
        picky.prompt_ids([user("x")], [], {})


def test_a_model_without_a_template_says_what_to_do(tokenizer):
    class Bare:
        chat_template = None

    with pytest.raises(ApiError, match="no chat template") as caught:
        ChatTemplate(Bare()).prompt_ids([user("x")], [], {})
    assert caught.value.status == 400


def test_a_template_that_hides_replies_starts_afresh(tokenizer):
    only_last = ChatTemplate(tokenizer, "{{ messages[-1].content }}")
    past = Conversation()
    (a,) = tokenizer.convert_tokens_to_ids(["a"])
    past.add(turn_of(past, [user("x")], only_last), [a], [-1.0], reply("a"))
    turn = turn_of(past, [user("x"), reply("a"), user("y")], only_last)
    assert not turn.continued and "template" in turn.why
