"""Loads a model that transformers runs, and refuses it unless the learner computes what it does.

Two things are compared before anything is trained. On a small random clone of the same config
(narrow, few layers, its switches as they are, windows shorter than the documents): scores of a pack
against the plain model on each document, and an export read back by transformers. On the model
itself: what would be exported against the files it was loaded from.
Never trains what it could not compare. Invariant: a refusal is one line that names the model's
type and what differs.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dora_rl.config import TrainerConfig
from dora_rl.model.directory import HfDirectory, tensor_files, write_model
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.foreign.policy import CheckpointFormat, ForeignPolicy, own_tensors
from dora_rl.trainer.policy.decoder import cast_parameters
from dora_rl.trainer.policy.logprobs import TokenScores
from dora_rl.types import UserError
from dora_rl.user_code import one_line, require

LENGTHS = (23, 21, 7, 1, 22)  # three share a batch and are padded, two are alone
# Of the spread of log-probs: rounding is far below, a document that sees another one far above.
DIFFERENCE_MAX = 1e-3
# In half precision, of the median: rounding lets some tokens choose another expert.
HALF_DIFFERENCE_MAX = 0.2

WINDOW = 8  # of the clone: documents longer than this leave it
FILE_BYTES_SMALL = 80 << 20  # a model with weights up to this size is cloned as wide as it is
PARAMS_MAX = 250_000_000
VOCAB_MAX = 512
WIDTH_MIN, WIDTH_MAX, WIDTH_UNIT = 32, 64, 16

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads")
_PARTS = (
    "num_key_value_heads",
    "num_kv_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_MLPS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# What says in which layer something first appears.
_FIRST_AT = ("first_k_dense_replace", "attn_layer_offset", "expert_layer_offset")
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
    "window_size",
)
# What the code of a model raises for them.
_SIZES_THAT_DO_NOT_FIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load_foreign(
    directory: Path, device: torch.device, dtype: torch.dtype, options: TrainerConfig
) -> ForeignPolicy:
    """The model of a directory, checked; float32 parameters."""
    trust = options.trust_remote_code
    config = read_config(directory, trust)
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    with _one_line(directory, config.model_type), _without_progress_bars():
        _refuse_by_config(config, trust)
        model = load_model(directory, examine(text, directory, dtype, trust), trust)
        policy = ForeignPolicy(model.to(device), dtype, options)
        compare_with_files(policy, directory)
    return policy


@contextlib.contextmanager
def _one_line(directory: Path, kind: str) -> Iterator[None]:
    """Whatever transformers or the model's own code says, as one line that names the model."""
    try:
        yield
    except Exception as error:
        why = str(error)
        if not isinstance(error, UserError):
            why = f"it does not run through transformers ({one_line(error)})"
        raise UserError(f"model '{directory}' (type '{kind}') cannot be trained: {why}") from error


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Those of a small clone would say nothing to the user."""
    logging = transformers.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_config(directory: Path, trust: bool) -> Any:
    """The config as transformers reads it."""
    try:
        return transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=trust)
    except (ValueError, OSError, KeyError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"model '{directory}': transformers cannot load it ({line})") from error


def _refuse_by_config(config: Any, trust: bool) -> None:
    """What needs no look at the weights."""
    name = next(iter(config.architectures or []), "")
    quantised = getattr(config, "quantization_config", None)
    require(
        (not quantised, "its weights are quantised; use the unquantised model"),
        (not config.is_encoder_decoder, "it has an encoder; use a causal language model"),
        # Otherwise transformers would run its own class of that model type, another model.
        (
            trust or not name or hasattr(transformers, name),
            f"transformers has no '{name}'; trainer.trust_remote_code runs a model's own code",
        ),
    )


def load_model(directory: Path, attention: str, trust: bool) -> Any:
    """transformers' own model in float32; every weight must come from the files."""
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(
        str(directory),
        dtype=torch.float32,
        trust_remote_code=trust,
        attn_implementation=attention,
        output_loading_info=True,
    )
    if missing := sorted({*info["missing_keys"], *(m[0] for m in info["mismatched_keys"])}):
        raise UserError(f"its files have no weight of the right shape for '{missing[0]}'")
    return model.eval()


# -- the clone ------------------------------------------------------------------------------------


@cache
def examine(config_text: str, directory: Path, dtype: torch.dtype, trust: bool) -> str:
    """The attention of transformers under which the learner agrees with the plain model.

    Plain is: float32, the simplest kernels (`eager`), one document at a time. The config is read
    again from the directory; its text is there so that a changed one is examined again.
    """
    config = read_config(directory, trust)
    file_bytes = sum(file.stat().st_size for file in set(tensor_files(directory).values()))
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.default_generator.manual_seed(0)  # the devices' own are left alone
        clone = make_clone(config, file_bytes, trust)
        case = _Case(clone)
        first, second = Path(folder, "clone"), Path(folder, "export")
        for made in (first, second):
            made.mkdir()
            for code in directory.glob("*.py") if trust else ():
                shutil.copy2(code, made)
        _write(clone, first)
        attention, policy = _pick_attention(first, case, trust)
        _check_export(policy, case, second, trust)
        _check_dtype(policy, case, dtype)
    return attention


def _write(model: Any, directory: Path) -> None:
    """As the learner exports. (`save_pretrained` writes on the first of several ranks only.)"""
    model.config.save_pretrained(directory)
    write_model(
        directory, CheckpointFormat(model).to_checkpoint(own_tensors(model).__getitem__), 1 << 40
    )


class _Case:
    """Random documents, and what the plain model makes of them."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or max(LENGTHS)
        lengths = [min(n, longest) for n in LENGTHS]
        self.ids = torch.randint(config.vocab_size, (sum(lengths),))
        self.target = torch.randint(config.vocab_size, (sum(lengths),))
        self.layout = Layout(lengths, torch.device("cpu"))
        table = self.table(model)
        self.spread = float(table.std())
        self.logprobs = table.gather(-1, self.target[:, None]).squeeze(-1)
        self.entropy = -(table.exp() * table).sum(-1)

    @torch.no_grad()
    def table(self, model: Any) -> Tensor:
        """Log-probs of every token at every place, by the model alone."""
        documents = self.ids.split(self.layout.lengths)
        logits = [model(input_ids=d[None], use_cache=False).logits[0] for d in documents]
        return torch.cat(logits).float().log_softmax(-1)

    def scores(self, policy: ForeignPolicy) -> TokenScores:
        return policy(self.ids, self.layout, torch.arange(len(self.ids)), self.target)

    def difference(self, scores: TokenScores, median: bool = False) -> float:
        """How far scores are from the model's own, in units of the spread of its log-probs."""
        far = (scores.logprobs_T - self.logprobs).abs(), (scores.entropy_T - self.entropy).abs()
        worst = torch.stack(far).detach()
        return float(worst.median() if median else worst.max()) / self.spread


def _pick_attention(directory: Path, case: _Case, trust: bool) -> tuple[str, ForeignPolicy]:
    """transformers' fast attention leaves out what its kernel has no place for (soft-caps)."""
    difference, options = float("nan"), TrainerConfig(device="cpu")
    for attention in ("sdpa", "eager"):
        try:
            policy = ForeignPolicy(load_model(directory, attention, trust), torch.float32, options)
        except (ValueError, ImportError):
            if attention == "eager":
                raise
            continue  # the model has none
        with torch.no_grad():
            difference = case.difference(case.scores(policy))
        if difference < DIFFERENCE_MAX:
            return attention, policy
    raise UserError(
        f"the learner's log-probs are {difference:.2g} of their spread away from those of "
        "transformers; it mixes documents or is not causal"
    )


def _check_export(policy: ForeignPolicy, case: _Case, folder: Path, trust: bool) -> None:
    """Export, read back by transformers and by the learner."""
    wanted = case.table(policy.inner)
    _write(policy.inner, folder)
    again = load_model(folder, "eager", trust)
    difference = float((case.table(again) - wanted).abs().max()) / case.spread
    require(
        (
            difference < DIFFERENCE_MAX,
            f"its export, read by transformers, gives log-probs {difference:.2g} of their spread "
            "away",
        )
    )
    own = own_tensors(policy.inner)
    read = dict(policy.format.from_checkpoint(HfDirectory(folder).tensor))
    if wrong := sorted(n for n in own if n not in read or not torch.equal(own[n], read[n])):
        raise UserError(f"its weight '{wrong[0]}' is not read back from an export as it was")


@torch.enable_grad()
def _check_dtype(policy: ForeignPolicy, case: _Case, dtype: torch.dtype) -> None:
    """In the dtype of training: near the plain model, with gradients, and the same from weights
    kept in that dtype, as sealed versions and the reference keep them."""
    policy.compute_in(dtype)
    try:
        scores = case.scores(policy)
        (scores.logprobs_T.sum() + scores.entropy_T.sum()).backward()
    except RuntimeError as error:
        raise UserError(f"it does not run in {dtype} ({str(error).splitlines()[0]})") from error
    difference = case.difference(scores, median=True)
    grads = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    bad = [*(n for n, g in grads.items() if not bool(g.isfinite().all())), "none"]
    require(
        (
            difference < HALF_DIFFERENCE_MAX,
            f"its log-probs in {dtype} are {difference:.2g} of their spread away",
        ),
        (grads and bad == ["none"], f"its gradients are not finite in {dtype} ({bad[0]})"),
    )
    cast_parameters(policy, dtype)
    require(
        (
            torch.equal(case.scores(policy).logprobs_T, scores.logprobs_T),
            f"in {dtype} a frozen copy of it computes other log-probs from the same weights; "
            "use trainer.compute_dtype = 'float32'",
        )
    )


# -- the model itself -----------------------------------------------------------------------------


def compare_with_files(policy: ForeignPolicy, directory: Path) -> None:
    """What would be exported is what was loaded: every name, and values of every kind of tensor.

    Layers and experts are alike, so of those whose names differ in numbers only the first and the
    last are read again.
    """
    prefix, names = f"{policy.inner.base_model_prefix}.", policy.format.names
    ends = ({re.sub(r"\d+", "#", name): name for name in way} for way in (names, names[::-1]))
    chosen = {name for of_kind in ends for name in of_kind.values()}
    own, reader = own_tensors(policy.inner), HfDirectory(directory)
    for name, tensor in policy.format.to_checkpoint(own.__getitem__):
        # Checkpoints of a body alone have no prefix; transformers reads both.
        known = [n for n in (name, name.removeprefix(prefix)) if n in reader.file_of]
        require((known, f"it would be exported with a tensor '{name}', unlike its files"))
        require(
            (
                name not in chosen
                or torch.equal(reader.tensor(known[0]).to(tensor.dtype), tensor.cpu()),
                f"it would be exported with another '{name}' than its files have",
            )
        )


# -- making the clone -----------------------------------------------------------------------------
#
# Cuts numbers of layers, heads, experts and tokens and the lengths of windows in a config of
# transformers; never touches what says how something is computed. The clone is a model of the same
# class, and every kind of layer that its config lists is in it.


def make_clone(config: Any, file_bytes: int, trust: bool) -> Any:
    """The smallest clone that can be built, in float32 on the CPU, with strong random weights."""
    last: Exception | None = None
    for data in _smaller(config.to_dict(), small=file_bytes <= FILE_BYTES_SMALL):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in _build(config, data, trust).parameters())
            if size > PARAMS_MAX:
                raise ValueError(f"{size:,} parameters")
            model = _build(config, data, trust)
            _randomise(model)
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        except _SIZES_THAT_DO_NOT_FIT as error:  # the next ones may
            last = error
        else:
            return model
    line = next(iter(str(last).strip().splitlines()), type(last).__name__)
    raise UserError(f"no small clone of it can be built to check it with ({line})")


def _build(config: Any, data: dict[str, Any], trust: bool) -> Any:
    return transformers.AutoModelForCausalLM.from_config(
        type(config).from_dict(data),
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=trust,
    ).eval()


def _smaller(config: dict[str, Any], small: bool) -> Iterator[dict[str, Any]]:
    """Configs to try, the smallest first."""
    if small:
        yield _narrow_windows(config)
    else:
        factors = _factors(config.get("text_config") or config)
        yield from (_shrink(config, f, cut_rest) for f in factors for cut_rest in (True, False))


def _factors(config: dict[str, Any]) -> list[int]:
    """By how much it may be narrower: widths stay what kernels ask of them and two heads or more
    are left, if that can be."""
    heads, widths = (list(_numbers(config, keys).values()) for keys in (_HEADS, _WIDTHS))
    common = math.gcd(*heads, *widths)
    limit = min(widths, default=1) // WIDTH_MIN

    def trouble(factor: int) -> tuple[bool, bool, int]:
        odd = any(width // factor % WIDTH_UNIT for width in widths)
        return odd, min(heads, default=factor) < 2 * factor, -factor

    factors = [f for f in range(min(common, limit), 1, -1) if common % f == 0]
    return [*sorted(factors, key=trouble)[:4], 1]


def _numbers(config: dict[str, Any], keys: Iterable[str]) -> dict[str, int]:
    """Those of the keys that the config has a number for."""
    return {key: config[key] for key in keys if isinstance(config.get(key), int)}


def _narrow_windows(config: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = config | {
        k: min(v, WINDOW) for k, v in _numbers(config, _WINDOWS).items()
    }
    if isinstance(made.get("text_config"), dict):
        made["text_config"] = _narrow_windows(made["text_config"])
    return made


def _shrink(config: dict[str, Any], factor: int, cut_rest: bool) -> dict[str, Any]:
    """Everything `factor` times narrower; with `cut_rest` small MLPs, few experts and few tokens
    as well."""
    made = _narrow_windows(config)
    if isinstance(made.get("text_config"), dict):
        return {**made, "text_config": _shrink(made["text_config"], factor, cut_rest)}
    widths = _numbers(made, (*_WIDTHS, *_HEADS, *_PARTS))
    made |= {key: max(1, value // factor) for key, value in widths.items()}
    _cut_layers(made)
    if cut_rest:
        _cut_rest(made)
    return made


def _cut_layers(made: dict[str, Any]) -> None:
    counts = _numbers(made, _LAYERS)
    count = next(iter(counts.values()), 0)
    keep = min(count, max(4, *(first + 1 for first in _numbers(made, _FIRST_AT).values()), 0))
    made |= dict.fromkeys(counts, keep)
    for key, value in made.items():
        if isinstance(value, list) and len(value) == count:
            made[key] = _prefix(value, keep)
        elif isinstance(value, list) and key.endswith("layer_indices"):
            made[key] = [i for i in value if i < keep] or [keep - 1]


def _prefix(values: list[Any], keep: int) -> list[Any]:
    """The first ones; kinds that come later only are put at the end."""
    head = values[:keep]
    kinds = [v for i, v in enumerate(values) if isinstance(v, str) and v not in values[:i]]
    missing = [v for v in kinds if v not in head]
    return [*head[: keep - len(missing)], *missing]


def _cut_rest(made: dict[str, Any]) -> None:
    made |= {key: min(value, WIDTH_MAX) for key, value in _numbers(made, _MLPS).items()}
    chosen = max(_numbers(made, [k for k in made if "per_tok" in k]).values(), default=2)
    groups = made.get("n_group") or 1
    few = math.ceil(max(8, 2 * chosen, 2 * groups) / groups) * groups
    made |= {key: min(value, few) for key, value in _numbers(made, _EXPERTS).items()}
    made["vocab_size"] = vocab = min(made.get("vocab_size") or VOCAB_MAX, VOCAB_MAX)
    tokens = _numbers(made, [key for key in made if key.endswith("token_id")])
    made |= {key: min(value, vocab - 1) for key, value in tokens.items()}


@torch.no_grad()
def _randomise(model: Any) -> None:
    """Weights under which everything matters: attention is sharp, no bias is zero."""
    for tensor in filter(torch.is_floating_point, own_tensors(model).values()):
        if tensor.dim() > 1:
            tensor.normal_(0.0, 1.5 / math.sqrt(tensor.shape[-1]))
        else:
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
