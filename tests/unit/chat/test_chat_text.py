"""Text that comes token by token, and tool calls in it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from dora_rl.chat.answers import BROKEN, TextStream, clear_of, read_tool_calls

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def decode_bytes(token_ids):
    """A tokenizer whose tokens are single bytes: characters arrive in parts."""
    return bytes(token_ids).decode(errors="replace")


@given(
    st.text(alphabet="ab\né€😀", max_size=40),
    st.lists(st.text(alphabet="ab\né", min_size=1, max_size=3), max_size=2),
    st.integers(1, 5),
)
@example("aéa", ["é", "aéa"], 1)  # the shorter one is complete before the longer one is seen
def test_pieces_add_up_to_the_text_before_the_first_stop_string(text, stops, size):
    stream = TextStream(decode_bytes, stops)
    ids = list(text.encode())
    given_out = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    given_out.append(stream.finish())
    seen = [decode_bytes(ids[: at + size]) for at in range(0, len(ids), size)]
    seen = [part for part in seen if not part.endswith(BROKEN)] + [text]
    cuts = [[at for stop in stops if (at := part.find(stop)) >= 0] for part in seen]
    cut = min(next((found for found in cuts if found), [len(text)]))
    assert "".join(given_out) == text[:cut] == stream.text


def test_half_a_character_waits_and_is_not_lost_at_the_end():
    stream = TextStream(decode_bytes)
    first, last = "é".encode()
    assert stream.push([first]) == "" and stream.push([last]) == "é"
    assert stream.push([first]) == "" and stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_the_beginning_of_a_mark_is_held_back():
    assert clear_of("say <tool", ("<tool_call>",)) == (4, False)
    assert clear_of("say <table", ("<tool_call>",)) == (10, False)
    assert clear_of("a<tool_call>b", ("<tool_call>",)) == (1, True)


def test_calls_of_offered_tools_are_read_and_others_stay_text():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    message = read_tool_calls(f"so {call}\n{call}", TOOLS, "c")
    assert message["content"] == "so "
    assert [c["id"] for c in message["tool_calls"]] == ["c_0", "c_1"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    for text in (call.replace("add", "rm"), "<tool_call>{broken</tool_call>", "<tool_call>3"):
        assert read_tool_calls(text, TOOLS, "c") == {"role": "assistant", "content": text}
    assert "tool_calls" not in read_tool_calls(call, [], "c")
