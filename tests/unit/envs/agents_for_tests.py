"""Agents as a user would write them, against the real `openai` client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

from openai import AsyncOpenAI, NotFoundError, OpenAI


def ask_twice(base_url, api_key, session_id, row):
    """Two turns; the reward is how many replies were right."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": row.prompt}]
    right = 0
    for follow_up in ("02:513\n", None):
        answer = client.chat.completions.create(
            model="any",
            messages=messages,
            logprobs=True,
            extra_headers={"X-Session-Id": session_id},
            extra_body={"return_token_ids": True},
        )
        choice = answer.choices[0]
        assert len(choice.token_ids) == len(choice.logprobs.content)
        assert answer.weight_version == 4 and answer.session["id"] == session_id
        right += choice.message.content == row.answer
        if follow_up is not None:
            messages += [choice.message, {"role": "user", "content": follow_up}]
    return right / 2


async def ask_twice_streamed(base_url, api_key, session_id, row):
    """The same as a coroutine, streamed; the reward is POSTed."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": row.prompt}]
    text = ""
    for follow_up in ("02:513\n", None):
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content async for chunk in stream])
        if follow_up is not None:
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": follow_up},
            ]
    reward = {"reward": float(text == row.answer)}
    await client.post(f"/sessions/{session_id}/reward", cast_to=dict, body=reward)


def own_prompt(base_url, api_key, row):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "system", "content": "00"}, {"role": "user", "content": row.prompt}]
    client.chat.completions.create(model="m", messages=messages)
    return 1.0


def forgets(base_url, api_key, row):
    """Sends another history in its second request."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    for text in (row.prompt, "11:111\n"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def says_nothing(row):
    return 1.0


def raises(row):
    raise ValueError(f"cannot do {row.prompt}")


def returns_words(base_url, api_key, row):
    messages = [{"role": "user", "content": row.prompt}]
    OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(model="m", messages=messages)
    return "good"


def peeks(base_url, api_key, row):
    """What others may not do: a wrong key, someone else's session."""
    request = urllib.request.Request(f"{base_url}/models", headers={"Authorization": "Bearer no"})
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        assert error.code == 401 and json.load(error)["error"]["code"] == "invalid_api_key"
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    try:
        client.post("/sessions/episode-999/reward", cast_to=dict, body={"reward": 9.0})
        raise AssertionError("another episode was rewarded")
    except NotFoundError:
        pass
    return ask_once(base_url, api_key, row)


def ask_once(base_url, api_key, row):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": row.prompt}]
    client.chat.completions.create(model="m", messages=messages, temperature=0.1, max_tokens=1)


def wants_more(base_url, api_key, browser):
    return 0.0


PROGRAM = """
import sys
from anthropic import Anthropic
from openai import OpenAI

asked = [{"role": "user", "content": sys.argv[1]}]
first = OpenAI(max_retries=0).responses.create(model="m", input=asked).output_text
asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "02:513\\n"}]
client = Anthropic(max_retries=0)
print(first + client.messages.create(model="m", max_tokens=9, messages=asked).content[0].text)
"""


def as_a_program(row, variables):
    """An agent that knows nothing of us but two variables of each client."""
    command = [sys.executable, "-c", PROGRAM, row.prompt]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return float(done.stdout.strip() == "=111=637")


def too_few_rewards(base_url, api_key, row):
    ask_once(base_url, api_key, row)
    return [0.5, 0.5]


def odd_rewards(base_url, api_key, row):
    ask_once(base_url, api_key, row)
    return [0.5, float("nan")]


def exits(row):
    """As `argparse` and many a program do."""
    sys.exit(f"cannot do {row.prompt}")


async def exits_later(row):
    sys.exit(f"cannot do {row.prompt}")
