"""A draft is what was said behind the same words, and what is remembered is bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.engine.drafts import ANSWERS_MAX, PAST_MAX, PLACES_MAX, Drafts
from dora_rl.types import RequestId

PROMPTS = ((0, 1, 2, 0, 1), (0,), (2, 1, 0))


class Talk:
    """Requests that say things, and everything that was said to a prompt."""

    def __init__(self, drafts: Drafts, suffix_min: int) -> None:
        self.drafts, self.suffix_min = drafts, suffix_min
        self.live: dict[RequestId, tuple[tuple[int, ...], list[int]]] = {}
        self.ended: dict[tuple[int, ...], list[list[int]]] = {}

    def begin(self, request: RequestId, prompt: tuple[int, ...], resumed: list[int]) -> None:
        self.end(request)
        self.live[request] = (prompt, [*prompt, *resumed])
        self.drafts.open(request, prompt, self.live[request][1])

    def end(self, request: RequestId) -> None:
        if request in self.live:
            prompt, tokens = self.live.pop(request)
            self.ended.setdefault(prompt, []).append(tokens)
            self.drafts.close(request)

    def places(self, request: RequestId) -> list[tuple[int, list[int]]]:
        """Common past and what follows, of all places where the request's last tokens stood."""
        prompt, mine = self.live[request]
        responses = [tokens for other, tokens in self.live.values() if other == prompt]
        # A prompt is one text: places in it are not those of each response again.
        texts = [(self.suffix_min, list(prompt))]
        texts += [(len(prompt), tokens) for tokens in (*responses, *self.ended.get(prompt, []))]
        found: list[tuple[int, list[int]]] = []
        for first, tokens in texts:
            for at in range(max(first, self.suffix_min), len(tokens)):
                past = 0
                while (
                    past < min(at, len(mine), PAST_MAX) and tokens[at - 1 - past] == mine[-1 - past]
                ):
                    past += 1
                if past >= self.suffix_min:
                    found.append((past, tokens[at:]))
        return found


REQUEST = st.builds(RequestId, st.integers(0, 2), st.integers(0, 2))
SAID = st.lists(st.integers(0, 2), max_size=6)
DOINGS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), REQUEST, st.sampled_from(PROMPTS), SAID),
        st.tuples(st.just("say"), REQUEST, st.none(), SAID),
        st.tuples(st.just("end"), REQUEST, st.none(), SAID),
        st.tuples(st.just("ask"), REQUEST, st.none(), SAID),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(doings=DOINGS, suffix_min=st.integers(1, 3), length=st.integers(1, 5))
def test_a_draft_follows_the_longest_common_past(doings, suffix_min: int, length: int) -> None:
    talk = Talk(Drafts(suffix_min), suffix_min)
    for what, request, prompt, said in doings:
        if what == "begin":
            talk.begin(request, prompt, said)
        elif what == "end":
            talk.end(request)
        elif request in talk.live:
            talk.live[request][1].extend(said)
        for asked in talk.live:
            draft, places = list(talk.drafts.draft(asked, length)), talk.places(asked)
            assert bool(draft) == bool(places)
            if not draft:
                continue
            pasts = [past for past, follows in places if follows[:length] == draft]
            assert pasts, "nobody said that"
            if len(places) <= PLACES_MAX:
                most = max(past for past, _ in places)
                longest = max(len(f[:length]) for past, f in places if past == most)
                assert max(pasts) == most and len(draft) == longest


def test_who_is_not_known_has_no_drafts() -> None:
    drafts, request = Drafts(), RequestId(0, 0)
    assert drafts.draft(request, 4) == ()
    drafts.open(request, (1, 2), [1, 2, 1, 2])
    assert drafts.draft(request, 4) == (1, 2)
    drafts.close(request)
    assert drafts.draft(request, 4) == ()


def test_earlier_answers_serve_and_are_forgotten_in_time() -> None:
    drafts, prompt = Drafts(), (1, 2, 3)
    for number in range(3 * ANSWERS_MAX):
        drafts.open(RequestId(number, 0), prompt, [*prompt, 100 + number, 7, 8])
        drafts.close(RequestId(number, 0))
        assert drafts.num_tokens <= (ANSWERS_MAX + 1) * 6
    known: list[bool] = []
    for number in range(3 * ANSWERS_MAX):
        asks = RequestId(number, 1)
        drafts.open(asks, prompt, [*prompt, 100 + number, 7])
        known.append(bool(drafts.draft(asks, 1)))
    assert all(known[-ANSWERS_MAX // 2 :]) and not any(known[:ANSWERS_MAX])


def test_prompts_that_nobody_runs_on_make_room() -> None:
    drafts = Drafts(tokens_max=100)
    for prompt in range(50):
        request = RequestId(prompt, 0)
        drafts.open(request, (prompt, 1), [prompt, 1, *range(10)])
        drafts.close(request)
        assert drafts.num_tokens <= 100
    drafts.open(RequestId(50, 0), (49, 1), [49, 1, 0, 1])
    assert drafts.draft(RequestId(50, 0), 3) == (2, 3, 4)


def test_where_all_run_no_more_are_taken_in() -> None:
    drafts = Drafts(tokens_max=40)
    for prompt in range(50):
        drafts.open(RequestId(prompt, 0), (prompt, 1), [prompt, 1, prompt, 1])
    assert drafts.num_tokens <= 40
    served = [bool(drafts.draft(RequestId(prompt, 0), 1)) for prompt in range(50)]
    assert served == [prompt < 6 for prompt in range(50)]
    drafts.clear()
    assert drafts.num_tokens == 0
