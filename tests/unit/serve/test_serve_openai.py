"""The real `openai` client against a real server: two turns, streams, errors, sessions, limits."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest

from tests.kit.places import MODEL

openai = pytest.importorskip("openai")
from dora_rl.setup.tokenizer import open_tokenizer  # noqa: E402
from tests.unit.serve.serving import alone, serving, wait_until  # noqa: E402

IDS = {"return_token_ids": True}
FIRST, SECOND = "03:271\n", "02:513\n"


@pytest.fixture(scope="module")
def served():
    with serving() as running:
        yield running


@pytest.fixture
def client(served):
    return served.client()


def user(text):
    return {"role": "user", "content": text}


def ids_of(text):
    return tuple(open_tokenizer(MODEL, False).encode(text))


def ask(client, messages, stream, session=None, **options):
    """One chat answer as (text, token ids, prompt ids, logprobs, finish, extras)."""
    headers = {"X-Session-Id": session} if session else None
    options = {"temperature": 0, "logprobs": True, "top_logprobs": 2} | options
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        stream=stream,
        extra_headers=headers,
        extra_body=IDS,
        **options,
    )
    if not stream:
        choice = answer.choices[0]
        return (
            choice.message.content,
            choice.token_ids,
            answer.prompt_token_ids,
            [entry.logprob for entry in choice.logprobs.content],
            choice.finish_reason,
            answer.model_extra,
        )
    chunks = list(answer)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert all(chunk.weight_version == chunks[0].weight_version for chunk in chunks)
    return (
        "".join(choice.delta.content or "" for choice in choices),
        [token for choice in choices for token in choice.token_ids],
        chunks[0].prompt_token_ids,
        [entry.logprob for choice in choices for entry in choice.logprobs.content],
        choices[-1].finish_reason,
        chunks[-1].model_extra,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_two_turn_agent_gets_what_the_engine_alone_gives(client, stream):
    """Ids, log-probs and text of both turns; the second continues the ids of the first."""
    session = f"agent-{stream}"
    messages = [user(FIRST)]
    text, ids, prompt, logprobs, finish, extra = ask(client, messages, stream, session)
    expected = alone(ids_of(FIRST), temperature=0, tokens_max=200)
    assert ids == expected.token_ids.tolist() and tuple(prompt) == ids_of(FIRST)
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-6) and finish == "stop"
    assert text == open_tokenizer(MODEL, False).decode(ids, skip_special_tokens=True)
    assert extra["weight_version"] == 0
    assert extra["session"] == {"id": session, "continued": False, "turn": 1}

    messages += [{"role": "assistant", "content": text}, user(SECOND)]
    _, ids2, prompt2, logprobs2, _, extra2 = ask(client, messages, stream, session)
    assert tuple(prompt2) == (*prompt, *ids, *ids_of(SECOND))
    expected = alone(tuple(prompt2), temperature=0, tokens_max=200)
    assert ids2 == expected.token_ids.tolist()
    assert logprobs2 == pytest.approx(expected.logprobs, abs=1e-5)
    assert extra2["session"] == {"id": session, "continued": True, "turn": 2}


def test_the_next_turn_prefills_only_what_is_new(served, client):
    before = served.engine.stats().prefill_tokens
    messages = [user(FIRST * 20)]
    text, _, prompt, *_ = ask(client, messages, False, "kv", max_tokens=20)
    first = served.engine.stats().prefill_tokens
    assert first - before == len(prompt)
    messages += [{"role": "assistant", "content": text}, user(SECOND)]
    ask(client, messages, False, "kv", max_tokens=5)
    # The last token of the first turn has no KV yet; it comes with the new ones.
    assert served.engine.stats().prefill_tokens - first == len(ids_of(SECOND)) + 1


def test_a_session_with_another_history_starts_afresh_and_says_so(client):
    ask(client, [user(FIRST)], False, "fork")
    *_, prompt, _, _, extra = ask(client, [user(SECOND)], False, "fork")
    assert tuple(prompt) == ids_of(SECOND)
    assert extra["session"]["continued"] is False
    assert "message 0" in extra["session"]["restarted_because"]


def test_rewards_end_a_session_and_its_record_is_complete(tmp_path):
    record = tmp_path / "sessions.jsonl"
    with serving(record=record) as running:
        client = running.client()
        opened = client.post("/sessions", cast_to=dict[str, object], body={})
        name = str(opened["id"])
        text, ids, prompt, logprobs, *_ = ask(client, [user(FIRST)], True, name)
        ended = client.post(
            f"/sessions/{name}/reward", cast_to=dict[str, object], body={"reward": 0.5}
        )
        assert ended["reward"] == 0.5 and ended["turns"] == 1
        with pytest.raises(openai.NotFoundError):
            client.get(f"/sessions/{name}", cast_to=dict[str, object])
        with pytest.raises(openai.BadRequestError, match="a number from"):
            client.post(f"/sessions/{name}/reward", cast_to=dict, body={"reward": "high"})
    (line,) = record.read_text().splitlines()
    saved = json.loads(line)
    assert saved["token_ids"] == ids and saved["prompt_token_ids"] == prompt
    assert saved["logprobs"] == pytest.approx(logprobs) and saved["loss_mask"] == [1] * len(ids)
    assert saved["messages"][-1] == {"role": "assistant", "content": text}
    assert saved["reward"] == 0.5 and saved["weight_version"] == 0


def test_completions_take_strings_lists_and_ids(client):
    def texts(prompt, **options):
        settings = {"model": "tiny", "max_tokens": 8, "temperature": 0} | options
        answer = client.completions.create(prompt=prompt, **settings)
        return [choice.text for choice in answer.choices], answer

    one, answer = texts(FIRST)
    assert answer.usage.prompt_tokens == len(FIRST) and answer.usage.completion_tokens == 8
    two, _ = texts([FIRST, SECOND])
    assert two[0] == one[0] and texts(list(ids_of(FIRST)))[0] == one
    assert texts([list(ids_of(FIRST)), list(ids_of(SECOND))])[0] == two
    many, answer = texts([FIRST, SECOND], n=2, temperature=1, seed=5, logprobs=3)
    assert len(many) == 4 and texts([FIRST, SECOND], n=2, temperature=1, seed=5)[0] == many
    logprobs = answer.choices[3].logprobs
    assert "".join(logprobs.tokens).removesuffix("<eos>") == many[3]
    assert len(logprobs.top_logprobs[0]) == 3
    chunks = list(client.completions.create(prompt=FIRST, stream=True, model="tiny", temperature=0))
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith(one[0])


def test_a_seed_gives_the_draws_of_the_engine_alone(client):
    for seed in (7, 8):
        got = ask(client, [user(FIRST)], False, temperature=1, seed=seed, max_tokens=30, top_p=0.9)
        assert got[1] == alone(ids_of(FIRST), seed, tokens_max=30, top_p=0.9).token_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
    whole = ask(client, [user(FIRST)], False)[0]
    stop = whole[3:5]
    text, ids, _, _, finish, _ = ask(client, [user(FIRST)], stream, stop=[stop, "never"])
    assert text == whole[: whole.index(stop)] and finish == "stop"
    assert open_tokenizer(MODEL, False).decode(ids).endswith(stop)


def test_a_stop_string_at_the_end_of_the_new_message_does_not_end_the_turn(client):
    messages = [user(FIRST)]
    text, *_ = ask(client, messages, False, "stops", stop="\n")
    messages += [{"role": "assistant", "content": text}, user(SECOND)]  # ends in a line feed
    _, ids, prompt, *_, extra = ask(client, messages, False, "stops", stop="\n", max_tokens=30)
    expected = alone(tuple(prompt), temperature=0, tokens_max=30, stop_strings=("\n",))
    assert extra["session"]["continued"] and len(ids) > 1
    assert ids == expected.token_ids.tolist()


def test_usage_and_length(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[user(FIRST)],
        max_completion_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(answer)
    assert chunks[-1].usage.completion_tokens == 3 and not chunks[-1].choices
    assert chunks[-2].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "gpt-4"}, 404, "model"),
        ({"model": "tiny@9"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"messages": [user("1" * 600)]}, 400, "messages"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 100000}, 400, "messages"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"n": 1000}, 400, "n"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"stop": [""]}, 400, "stop"),
        ({"presence_penalty": 1.0}, 400, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"session_id": "s", "n": 2}, 400, "n"),
    ],
)
def test_bad_requests_get_the_usual_errors(client, body, status, param):
    request = {"model": "tiny", "messages": [user(FIRST)]} | body
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", cast_to=dict[str, object], body=request)
    error = caught.value
    assert error.status_code == status and error.param == param
    assert isinstance(error.body, dict) and {"message", "type", "param", "code"} <= set(error.body)


@pytest.mark.parametrize("prompt", [[], "", [99], [[]], [-1], {"a": 1}])
def test_bad_prompts_are_refused(client, prompt):
    with pytest.raises(openai.BadRequestError):
        client.post("/completions", cast_to=dict, body={"model": "tiny", "prompt": prompt})


def test_broken_bodies_and_unknown_paths(served, client):
    request = urllib.request.Request(f"{served.server.url}/chat/completions", data=b"{not json")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400 and "JSON" in json.load(caught.value)["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="Invalid URL"):
        client.post("/embeddings", cast_to=dict, body={})
    with pytest.raises(openai.NotFoundError, match="the address without /v1"):
        client.post("/v1/messages", cast_to=dict, body={})


def test_models_are_listed(client):
    names = [model.id for model in client.models.list()]
    assert names == ["tiny", "tiny@0"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_key_is_asked_for():
    with serving(api_keys=("right",)) as running:
        assert running.client(api_key="right").models.list().data
        for key in ("wrong", "right!"):
            with pytest.raises(openai.AuthenticationError) as caught:
                running.client(api_key=key).models.list()
            assert caught.value.code == "invalid_api_key"
        health = running.server.url.removesuffix("/v1") + "/health"
        assert json.load(urllib.request.urlopen(health)) == {"status": "ok"}


def test_a_client_that_leaves_is_forgotten(served, client):
    """Streamed and not: what it asked for ends, its session is as before."""
    before = served.engine.stats().decode_tokens
    long = {"ignore_eos": True, "min_p": 0.0}
    messages = [user(FIRST)]
    text, *_ = ask(client, messages, False, "leaver", max_tokens=5)
    more = [*messages, {"role": "assistant", "content": text}, user(SECOND)]
    stream = client.chat.completions.create(
        model="tiny", messages=more, stream=True, extra_headers={"X-Session-Id": "leaver"},
        extra_body=long,
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        served.client(timeout=0.3).completions.create(
            model="tiny", prompt=FIRST, n=64, max_tokens=500, extra_body=long
        )
    wait_until(lambda: served.service.num_running == 0, "both are gone")
    wait_until(lambda: not served.engine.has_work(), "the engine rests")
    assert served.engine.stats().decode_tokens - before < 64 * 500
    *_, extra = ask(client, more, False, "leaver", max_tokens=5)
    assert extra["session"] == {"id": "leaver", "continued": True, "turn": 2}


def test_a_full_server_and_a_busy_session_say_so():
    with serving(requests_max=2, sessions_max=1) as running:
        client = running.client()
        stream = client.chat.completions.create(
            model="tiny", messages=[user(FIRST)], stream=True,
            extra_headers={"X-Session-Id": "one"}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt=FIRST, n=3)
        with pytest.raises(openai.RateLimitError, match="open sessions"):
            ask(client, [user(FIRST)], False, "two")
        stream.close()


def test_many_clients_at_once_get_their_own_answers(client):
    prompts = [f"0{1 + i % 4}:{100 + 37 * i % 900}\n" for i in range(12)]
    alone_texts = [ask(client, [user(p)], False, max_tokens=40)[1] for p in prompts]
    got: dict[int, list[int]] = {}

    def one(index):
        got[index] = ask(client, [user(prompts[index])], True, max_tokens=40)[1]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(prompts))] == alone_texts


def test_messages_and_responses_are_the_same_model_and_sessions(served, client):
    """Both say what a chat says, and go on in its session."""
    anthropic = pytest.importorskip("anthropic")
    chat = client.chat.completions.create(model="tiny", messages=[user(FIRST)], temperature=0)
    text = chat.choices[0].message.content
    with anthropic.Anthropic(base_url=served.server.url.removesuffix("/v1"), api_key="none") as one:
        headers, greedy = {"X-Session-Id": "of-three"}, {"temperature": 0}
        said = one.messages.create(
            model="tiny",
            max_tokens=64,
            messages=[user(FIRST)],
            extra_headers=headers,
            extra_body=greedy,
        )
    assert said.content[0].text == text and said.session["turn"] == 1
    items = [user(FIRST), {"role": "assistant", "content": text}, user(SECOND)]
    response = client.responses.create(
        model="tiny", input=items, temperature=0, extra_headers=headers
    )
    assert response.session == {"id": "of-three", "continued": True, "turn": 2}
    alone_again = client.responses.create(model="tiny", input=FIRST, temperature=0)
    assert alone_again.output_text == text
