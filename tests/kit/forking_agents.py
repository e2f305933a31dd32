"""An agent whose history forks, as a user would write it, with the official clients.

It asks a sub-agent, compacts its history, asks the same twice at once and edits what it was
answered. Its messages are digits, as the tiny model's are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CLIENTS: dict[str, Any] = {}
SUB_TASK, RESULT, SHORT = "02:513\n", "03:271\n", "01:15\n"


def with_openai(base_url, api_key, row):
    """`OPENAI_BASE_URL` and `OPENAI_API_KEY` would do as well."""
    from openai import OpenAI

    client = CLIENTS.setdefault(f"openai {base_url}", OpenAI(base_url=base_url, api_key="none"))
    client = client.with_options(api_key=api_key, max_retries=0)

    def ask(*texts: str) -> str:
        answer = client.chat.completions.create(model="policy", messages=messages_of(*texts))
        return answer.choices[0].message.content

    return story(ask, row)


def with_responses(base_url, api_key, row):
    from openai import OpenAI

    client = CLIENTS.setdefault(f"openai {base_url}", OpenAI(base_url=base_url, api_key="none"))
    client = client.with_options(api_key=api_key, max_retries=0)

    def ask(*texts: str) -> str:
        return client.responses.create(model="policy", input=messages_of(*texts)).output_text

    return story(ask, row)


def with_anthropic(base_url, api_key, row):
    """`ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` would do as well."""
    from anthropic import Anthropic

    url = base_url.removesuffix("/v1")
    client = CLIENTS.setdefault(f"anthropic {url}", Anthropic(base_url=url, api_key="none"))
    client = client.with_options(api_key=api_key, max_retries=0)

    def ask(*texts: str) -> str:
        with client.messages.stream(
            model="policy", max_tokens=64, messages=messages_of(*texts)
        ) as stream:
            return stream.get_final_text() if stream.get_final_message().content else ""

    return story(ask, row)


def messages_of(*texts: str) -> list[dict[str, str]]:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def story(ask: Callable[..., str], row: Any) -> list[float]:
    """Seven answers, and a reward for each."""
    first = ask(row.prompt)
    from_sub_agent = ask(SUB_TASK)  # a sub-agent: a history of its own
    second = ask(row.prompt, first, RESULT)  # the main agent goes on
    compact = ask(SHORT)  # compaction: what came before gives way to a few words
    edited = ask(row.prompt, first.replace("1", "2") + "7", RESULT)  # not what was written
    with ThreadPoolExecutor(2) as pool:  # the same, side by side
        both = list(pool.map(lambda text: ask(text), [SHORT + SHORT] * 2))
    # Which of the two was answered first is not known here, so both get the same.
    said = [first, from_sub_agent, second, compact, edited, *["".join(both)] * 2]
    return [float(len(text) % 3) for text in said]
