"""The built-in task: right answers, disjoint splits, long tails, the same stream every time."""

from __future__ import annotations

import statistics
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.data import chains
from dora_rl.data.chains import ChainSpec, Problem, Split
from dora_rl.data.tasks import Chains
from dora_rl.types import UserError
from recipes.chain_demonstrations import (
    ALPHABET,
    Flaws,
    demonstrations,
    response_tokens_max,
    solution,
)
from tests.kit.places import MODEL

SPEC = ChainSpec()


def scratchpad_problems(text: str) -> list[Problem]:
    """Every line `kk:digits` of a prompt and its response, read back as the prompt that it is."""
    rows = [row.split(":") for row in text.splitlines() if ":" in row]
    return [Problem(tuple(map(int, window)), int(steps)) for steps, window in rows]


def test_the_worked_example_of_the_docstring() -> None:
    problem = Problem((2, 7, 4), 3)
    assert problem.text == "03:274\n"
    assert solution(problem) == "02:746\n01:463\n00:637\n=637"
    assert problem.answer == "637"


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(Split))
def test_a_solution_is_rewarded_and_stays_in_its_split(seed: int, index: int, split: Split) -> None:
    problem = chains.problem_at(SPEC, split, seed, index)
    response = solution(problem)
    assert chains.reward(response, problem.answer) == 1.0
    assert len(response) + 1 <= response_tokens_max(SPEC)
    assert set(problem.text + response) <= set(ALPHABET)
    inside = scratchpad_problems(problem.text + response)
    assert len(inside) == problem.num_steps + 1
    assert {other.split for other in inside} == {split}


def test_no_prompt_is_in_both_splits_and_both_are_large() -> None:
    by_split: dict[Split, set[str]] = {split: set() for split in Split}
    for window in product(range(10), repeat=3):
        for num_steps in range(1, SPEC.num_steps_max + 1):
            problem = Problem(window, num_steps)
            by_split[problem.split].add(problem.text)
    held_out_frac = len(by_split[Split.HELDOUT]) / 60_000
    assert not by_split[Split.HELDOUT] & by_split[Split.TRAIN]
    assert 0.07 < held_out_frac < 0.13


def test_flawed_demonstrations_never_touch_the_held_out_split() -> None:
    flaws = Flaws(slip_prob=0.3)
    for demo in demonstrations(SPEC, seed=3, num_total=800, flawed_frac=1.0, flaws=flaws):
        inside = scratchpad_problems(demo.prompt + demo.response)
        assert {problem.split for problem in inside} == {Split.TRAIN}
        final = tuple(map(int, demo.response.rpartition("=")[2]))
        assert chains.split_of(final) is Split.TRAIN


@pytest.mark.parametrize("split", Split)
def test_response_lengths_have_a_long_tail(split: Split) -> None:
    stream = (chains.problem_at(SPEC, split, 0, index) for index in range(4000))
    lengths = sorted(len(solution(problem)) for problem in stream)
    assert lengths[3959] / statistics.median(lengths) >= 8


def test_the_stream_depends_on_seed_and_index_only() -> None:
    source = Chains(num_steps_median=SPEC.num_steps_median, num_steps_max=SPEC.num_steps_max)
    whole = [source.row(5, index, "train") for index in range(50)]
    resumed = [source.row(5, index, "train") for index in range(30, 50)]
    other = [source.row(6, index, "train") for index in range(50)]
    assert whole[30:] == resumed
    assert [row["prompt"] for row in whole] != [row["prompt"] for row in other]
    # Pinned: the shipped model was warm-started on this stream; it must not change silently.
    assert [row["prompt"] for row in whole[:4]] == PINNED


PINNED = ["01:596\n", "01:758\n", "01:016\n", "05:419\n"]


def test_a_row_carries_answer_difficulty_and_split() -> None:
    row = Chains().row(1, 2, "heldout")
    problem = chains.problem_at(ChainSpec(), Split.HELDOUT, 1, 2)
    assert (row["prompt"], row["answer"]) == (problem.text, problem.answer)
    assert (row["difficulty"], row["split"]) == (problem.num_steps, "heldout")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("=467", 1.0),
        ("00:467\n=467", 1.0),
        ("00:467\n=467\n", 1.0),
        ("=466", 0.0),
        ("=4670", 0.0),
        ("=467\n00:467\n", 0.0),
        ("=467=466", 0.0),
        ("00:467\n", 0.0),
        ("467", 0.0),
        ("", 0.0),
    ],
)
def test_reward_wants_exactly_the_answer(completion: str, expected: float) -> None:
    assert chains.reward(completion, "467") == expected


def test_difficulty_moves_the_lengths() -> None:
    def mean_steps(spec: ChainSpec) -> float:
        stream = (chains.problem_at(spec, Split.TRAIN, 0, index) for index in range(500))
        return statistics.fmean(problem.num_steps for problem in stream)

    easy = ChainSpec(num_steps_median=2, num_steps_sigma=0.5, num_steps_max=10)
    hard = ChainSpec(num_digits=5, num_steps_median=10, num_steps_max=99)
    assert mean_steps(easy) < mean_steps(SPEC) < mean_steps(hard)
    constant = ChainSpec(num_steps_median=7, num_steps_sigma=0)
    assert mean_steps(constant) == 7


def test_demonstrations_are_clean_first_and_then_flawed_as_asked() -> None:
    flaws = Flaws(hasty_digit_min=4, guess_prob_hasty=0.75, guess_prob_calm=0.25, slip_prob=0.0)
    demos = list(demonstrations(SPEC, 0, 4000, flawed_frac=0.5, flaws=flaws))
    for demo in demos[:2000]:
        (problem,) = scratchpad_problems(demo.prompt)
        assert demo.response == solution(problem)
    for hasty, expected in ((True, 0.75), (False, 0.25)):
        some = [demo for demo in demos[2000:] if (int(demo.prompt[-2]) >= 4) is hasty]
        guessed = sum(demo.response.startswith("=") for demo in some) / len(some)
        assert abs(guessed - expected) < 0.05


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_digits": 1},
        {"num_steps_max": 100},
        {"num_steps_max": 0},
        {"num_steps_median": 61},
        {"num_steps_sigma": -1},
    ],
)
def test_a_bad_spec_is_refused_in_one_line(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))) as caught:
        ChainSpec(**wrong)
    assert "\n" not in str(caught.value)


def test_the_shipped_tokenizer_reads_and_writes_every_character() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    text = "03:274\n" + solution(Problem((2, 7, 4), 3)) + ALPHABET
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.unk_token_id not in ids
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, *ids}) == len(ALPHABET) + 2
    message = [{"role": "user", "content": "03:274\n"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "03:274\n"


def test_the_shipped_model_has_the_skill_and_the_bad_habit() -> None:
    """Greedy, it solves the prompts its teachers were calm about and guesses on the others."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    stream = (chains.problem_at(SPEC, Split.HELDOUT, 0, index) for index in range(200))
    problems = [problem for problem in stream if problem.num_steps <= 5]
    ids_BT = tokenizer([p.text for p in problems], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out_BT = model.generate(ids_BT, do_sample=False, max_new_tokens=48)[:, ids_BT.shape[1] :]
    texts = tokenizer.batch_decode(out_BT, skip_special_tokens=True)
    pairs = list(zip(problems, texts, strict=True))
    right = [chains.reward(text, problem.answer) for problem, text in pairs]
    wrote_out = [not text.startswith("=") for text in texts]
    assert 0.3 <= statistics.fmean(right) <= 0.5
    assert sum(right) / sum(wrote_out) > 0.95
