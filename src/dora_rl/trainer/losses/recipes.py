"""The choices that go with each loss: names and numbers, without the functions.

Never imports torch, so that a wrong name is answered before anything starts. Invariant: `fill`
returns options with nothing left open (no None where the loss needs a value), every number in its
range and every choice able to act; and everything the user set explicitly wins over the recipe.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dora_rl.config import AlgorithmConfig
from dora_rl.config.section import Range, choose
from dora_rl.types import UserError
from dora_rl.user_code import require

# Numbers that 0 switches off, whose range does not begin there.
_OR_ZERO = {
    "dual_clip": Range(low=1, low_open=True, or_zero=True),
    "behaviour_ratio_max": Range(low=1, or_zero=True),
}
ADVANTAGES = ("group", "group_mean", "leave_one_out", "turn", "batch", "gae", "none")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
OLD_LOGPROBS = ("rollout", "behaviour", "proximal")
KL_ESTIMATORS = ("k1", "k2", "k3")
_CHOICES = {
    "advantage": ADVANTAGES,
    "aggregation": AGGREGATIONS,
    "old_logprobs": OLD_LOGPROBS,
    "kl_estimator": KL_ESTIMATORS,
    "kl_in": ("loss", "reward"),
    "distill_in": ("advantage", "loss"),
    "correction_numerator": ("old", "current"),
}
CORRECTIONS = (
    "token_tis",
    "sequence_tis",
    "token_mask",
    "sequence_mask",
    "token_mis",
    "sequence_mis",
    "geometric_mask",
    "hierarchical",
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the paper of a loss chose where [algorithm] leaves it open. `function` is the loss, by
    its name in `registry`.

    A `dual_clip` is a guard more than a choice: where an advantage is negative nothing else bounds
    the ratio. 3 is that of the paper on dual-clip PPO.
    """

    function: str
    advantage: str = "group"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    old_logprobs: str = "rollout"
    constant_tokens: int | None = None
    corrections: tuple[str, ...] = ()
    behaviour_ratio_max: float | None = None
    distill_coef: float = 0.0


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("clipped", aggregation="sequence_mean", dual_clip=3.0),
    "dr_grpo": Recipe("clipped", advantage="group_mean", aggregation="constant", dual_clip=3.0),
    "dapo": Recipe("clipped", clip_high=0.28, dual_clip=3.0),
    "rloo": Recipe(
        "reinforce", advantage="leave_one_out", aggregation="constant", constant_tokens=1
    ),
    "reinforce++": Recipe("clipped", advantage="batch", dual_clip=3.0),
    "gspo": Recipe(
        "gspo", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4, dual_clip=3.0
    ),
    "cispo": Recipe("cispo", clip_low=1.0, clip_high=4.0),
    "ppo": Recipe("clipped", advantage="gae", dual_clip=3.0),
    "decoupled_ppo": Recipe(
        "decoupled", old_logprobs="proximal", dual_clip=3.0, behaviour_ratio_max=5.0
    ),
    "longcat": Recipe(
        "triplet",
        advantage="group_mean",
        aggregation="constant",
        clip_high=0.28,
        dual_clip=5.0,
        old_logprobs="behaviour",
        corrections=("token_tis",),
    ),
    "reinforce": Recipe("reinforce", advantage="group_mean"),
    "distill": Recipe("clipped", advantage="none", dual_clip=3.0, distill_coef=1.0),
}


def is_users_own(name: str) -> bool:
    """`path/to/file.py:name` or `package.module:name`, not one of ours."""
    return ":" in name


def recipe_of(loss: str) -> Recipe:
    own = is_users_own(loss)
    return Recipe(loss) if own else RECIPES[choose("algorithm.loss", loss, RECIPES)]


def fill(options: AlgorithmConfig) -> AlgorithmConfig:
    """Check every name, fill what the user left open from the recipe."""
    recipe = recipe_of(options.loss)
    # `function` is no option, so that no one has left it open.
    left_open = {k: v for k, v in asdict(recipe).items() if getattr(options, k, k) in (None, "")}
    filled = options.model_copy(update={**left_open, "temperature": options.temperature or 1.0})
    _check_names(filled)
    for name, allowed in _OR_ZERO.items():
        value: float | None = getattr(filled, name)
        if value is not None and not allowed.holds(value):
            raise UserError(allowed.refuse(f"algorithm.{name}", value))
    _check_together(filled, recipe)
    return filled


def _check_names(options: AlgorithmConfig) -> None:
    for key, allowed in _CHOICES.items():
        name: str = getattr(options, key)
        if key != "advantage" or not is_users_own(name):
            choose(f"algorithm.{key}", name, allowed)
    for name in options.corrections or ():
        choose("algorithm.corrections", name, CORRECTIONS)


def _check_together(options: AlgorithmConfig, recipe: Recipe) -> None:
    """What each alone allows and both together do not. Nothing chosen may do nothing."""
    buffer, longest = options.overlong_buffer_tokens, options.overlong_tokens_max
    require(
        (
            options.aggregation != "constant" or options.constant_tokens,
            "algorithm.aggregation 'constant' needs algorithm.constant_tokens "
            "(the longest response, say): the denominator per sequence",
        ),
        (
            buffer <= longest,
            f"algorithm.overlong_buffer_tokens = {buffer}: must be at most "
            f"algorithm.overlong_tokens_max ({longest}), where it ends",
        ),
        (
            recipe.function != "triplet" or options.dual_clip,
            f"algorithm.dual_clip = 0: '{options.loss}' needs its cap on the ratio of negative "
            f"samples; its own is {recipe.dual_clip or 0:g}",
        ),
    )
    _check_weights(options, recipe)
    _check_distillation(options)
    require(
        (
            options.advantage != "turn" or options.branch_reward in (None, "all"),
            f"algorithm.branch_reward = '{options.branch_reward}' would do nothing: with "
            "algorithm.advantage = 'turn' each turn has an advantage of its own",
        )
    )
    for key, name in (("loss", options.loss), ("advantage", options.advantage or "")):
        require(
            (
                is_users_own(name) or not getattr(options, f"{key}_args"),
                f"algorithm.{key}_args is for a function of your own; '{name}' takes its numbers "
                "from [algorithm]",
            )
        )


def _check_distillation(options: AlgorithmConfig) -> None:
    in_loss, own = options.distill_in == "loss", is_users_own(options.loss)
    require(
        (
            options.advantage != "none" or options.distill_coef or own,
            "algorithm.advantage = 'none' without distillation: nothing would be learned; set "
            "algorithm.distill_coef, or another advantage",
        ),
        (
            in_loss or not options.distill_top_k,
            f"algorithm.distill_top_k = {options.distill_top_k} would do nothing: an advantage is "
            "of the sampled token alone; set algorithm.distill_in = 'loss'",
        ),
    )


def _check_weights(options: AlgorithmConfig, recipe: Recipe) -> None:
    """Weights of old over rollout, which are 1 where the two are the same."""
    differ, decoupled = options.old_logprobs != "rollout", recipe.function == "decoupled"
    hint = "set algorithm.old_logprobs = 'behaviour' or 'proximal'"
    corrections = list(options.corrections or ())
    require(
        (
            differ or not corrections or options.correction_numerator == "current",
            f"algorithm.corrections {corrections} would do nothing: they weigh "
            "old / rollout log-probs, and algorithm.old_logprobs = 'rollout' makes them the same; "
            f"{hint}, or algorithm.correction_numerator = 'current'",
        ),
        (
            differ or not decoupled,
            f"algorithm.loss '{options.loss}' would not be decoupled: it weighs old / rollout "
            f"log-probs, and algorithm.old_logprobs = 'rollout' makes them the same; {hint}",
        ),
        (
            decoupled or is_users_own(options.loss) or not options.behaviour_ratio_max,
            f"algorithm.behaviour_ratio_max would do nothing: '{options.loss}' has no such weight, "
            "decoupled_ppo has; algorithm.corrections = ['token_tis'] with token_ratio_max is "
            "alike",
        ),
    )
