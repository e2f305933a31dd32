"""An agent for the digit chains: asks, and asks once more when the answer is wrong."""

from __future__ import annotations

from openai import OpenAI

from dora_rl.data.chains import reward

CLIENTS: dict[str, OpenAI] = {}


def agent(base_url, api_key, row):
    client = CLIENTS.setdefault(base_url, OpenAI(base_url=base_url, api_key="none"))
    client = client.with_options(api_key=api_key)
    messages = [{"role": "user", "content": row.prompt}]
    for worth in (1.0, 0.25):
        answer = client.chat.completions.create(
            model="policy", messages=messages, stream=worth < 1.0
        )
        if worth < 1.0:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        if reward(text, row.answer):
            return worth
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": row.prompt},
        ]
    return 0.0
