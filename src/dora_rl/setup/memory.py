"""How the memory of one GPU is divided between instances, learner and evaluator. Pure arithmetic.

Every figure is a line of a table (`Line`), so that the plan can be printed, compared with measured
peaks and obeyed. Sizes that the configuration leaves open (0 or "auto") are chosen here and
nowhere else: the KV pool, the tokens of a pack, activation checkpointing, the chunk of the logits
and the resident versions. Never allocates and never imports torch.

The learner's peak comes in one of three moments, and the plan takes the largest:

    logits   all saved activations + one chunk of float32 logits with its gradient
    layer    all saved activations + one layer's, computed again (checkpointing) or being freed
    twin     no activations and no gradients, but a frozen version that samples are computed again
             under (workers/recheck.py)

What a layer saves is counted tensor by tensor (`layer_bytes`); a test holds it against autograd.

Invariant: the lines of a plan that fits add up to at most the memory it was made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dora_rl.model.spec import ModelSpec

GB = 1_000_000_000
CONTEXT_BYTES = 700_000_000  # CUDA's context and cuBLAS in one process
FRAGMENTED = 1.08  # what the allocator holds over what is in use at the peak
RESERVE_SHARE = 0.03  # of a device, kept free for what nobody foresaw
EVALUATOR_REQUESTS = 128  # at once, at most: it has no hurry
CHUNK_ELEMENTS = (1 << 29, 1 << 27, 1 << 25)  # of one chunk's logits, the fastest first
DECODED_TOKENS_MIN = 128  # of KV for each request that is decoded: more of them would only spill
EVALUATOR_STEP_TOKENS = 2048  # rows of one of its steps, at most
# Measured in this order of speed (docs/lab): recomputing costs a fifth, small packs more.
WAYS = (
    ("none", 32_768),
    ("none", 16_384),
    ("layer", 32_768),
    ("none", 8_192),
    ("layer", 16_384),
    ("layer", 8_192),
    ("none", 4_096),
    ("layer", 4_096),
    ("layer", 2_048),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """How far the plan goes before it tries what costs more. `kv_shares` are of the KV that every
    request in flight would need at full length; most end long before."""

    versions_min: int
    kv_shares: tuple[float, ...]
    pack_min: int
    evaluator_part: int  # it answers so many times fewer requests at once, in smaller steps
    handover: bool = False  # a version may lie on the device a second time


# A smaller KV cache and computing layers again cost a little speed, fewer resident versions cost
# moves of requests, small packs and a small cache cost the most.
STAGES = (
    Stage(2, (0.5, 0.25), 8_192, 1, handover=True),
    Stage(2, (0.25, 0.1), 2_048, 1),
    Stage(1, (0.1, 0.03), 2_048, 4),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table: `who` needs `num_bytes` for `what`."""

    who: str
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """What a run asks of one device. Zero or an empty string: the plan chooses."""

    spec: ModelSpec
    versions_max: int  # resident on an instance, at most
    num_instances: int = 1  # on this device; 0: the learner has it to itself
    names: tuple[str, ...] = ()  # of the instances
    learner: bool = True
    learner_name: str = "learner"
    num_ranks: int = 1  # that share the learner's state
    evaluator: bool = False
    evaluator_requests: int = EVALUATOR_REQUESTS  # that the evaluator answers at once
    others_bytes: int = 0  # in use by other programs
    lora_rank: int = 0  # only adapters of this rank are trained
    adapters: bool = True  # with LoRA, a version is its adapter; otherwise whole weights
    base_bytes: int = 2  # of a number of the learner's frozen base
    compute_bytes: int = 2  # of a number of the learner's activations
    item_bytes: int = 2  # of a number of the instances' weights and KV
    num_requests: int = 256  # that an instance may have at once
    request_tokens_max: int = 1024  # prompt and response
    step_tokens_max: int = 2048  # rows of one engine step
    compiled: bool = True  # layers are, and so save less
    rechecks: bool = False  # samples are computed again under frozen versions, now and then
    num_twins: int = 0  # frozen copies in the learner: reference, sealed versions
    teacher: ModelSpec | None = None  # that the learner holds, frozen
    critic: bool = False
    kv_bytes: int = 0
    pack_tokens: int = 0
    checkpointing: str = ""
    chunk_tokens: int = 0
    routing: bool = False  # instances record which experts each token went to
    versions_fixed: bool = False  # the user said how many; otherwise fewer may do
    handover: bool | None = False  # instances take versions from the device; None: the plan chooses


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A division of the device. `fits` is False where even the smallest one does not."""

    total_bytes: int
    lines: tuple[Line, ...]
    kv_bytes: int  # of each instance
    num_requests: int  # that an instance decodes at once; others wait in it
    evaluator_kv_bytes: int
    evaluator_requests: int
    evaluator_step_tokens: int
    pack_tokens: int
    checkpointing: str
    chunk_tokens: int
    versions_max: int
    handover: bool
    fits: bool

    @property
    def planned_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    def of(self, who: str) -> int:
        """All that one of them needs."""
        return sum(line.num_bytes for line in self.lines if line.who == who)

    def table(self) -> list[str]:
        """For a person: a row each, then what is left."""
        rows = [
            f"{line.who:<12} {line.what:<44} {line.num_bytes / GB:8.2f} GB" for line in self.lines
        ]
        left = (self.total_bytes - self.planned_bytes) / GB
        return [*rows, f"{'':<12} {'left':<44} {left:8.2f} GB of {self.total_bytes / GB:.1f}"]


def body_params(spec: ModelSpec) -> int:
    """Parameters of all layers."""
    attention = spec.hidden * (spec.qkv_rows + spec.num_heads * spec.head_dim)
    dense = 3 * spec.hidden * spec.intermediate
    total = spec.num_layers * (attention + dense)
    if spec.moe is not None:
        sparse = len(spec.moe.sparse_layers)
        experts = spec.moe.num_experts * 3 * spec.hidden * spec.moe.intermediate
        total += sparse * (experts + spec.moe.num_experts * spec.hidden - dense)
    return total


def num_params(spec: ModelSpec) -> int:
    return body_params(spec) + (1 if spec.tied else 2) * spec.vocab * spec.hidden


def shelf_bytes(params: int, item_bytes: int) -> int:
    """Of a version on the device, and of what rounding took from its masters: two bytes for each
    in half precision."""
    return params * (item_bytes + (2 if item_bytes == 2 else 0))


def adapter_params(spec: ModelSpec, rank: int) -> int:
    """Of LoRA on every linear layer of the blocks."""
    heads, hidden = spec.num_heads * spec.head_dim, spec.hidden
    inputs = 1 if spec.fused_qkv else 3, 1 if spec.fused_gate_up else 2
    attention = inputs[0] * hidden + spec.qkv_rows + (heads + hidden)
    wide = inputs[1] * hidden + 2 * spec.intermediate + (spec.intermediate + hidden)
    return rank * spec.num_layers * (attention + wide)


def slots_params(spec: ModelSpec, rank: int, slots: int) -> int:
    """Of so many adapters in an engine, as it stacks them: a matrix of several parts has room for
    each part's rows under every other, and what stands under a base matrix is rounded up."""
    heads, key = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    shapes = (  # rows, columns, parts
        (heads + key, spec.hidden, 3),
        (spec.hidden, heads, 1),
        (2 * spec.intermediate, spec.hidden, 2),
        (spec.hidden, spec.intermediate, 1),
    )
    down = (-(-slots * parts * rank // 128) * 128 * columns for _, columns, parts in shapes)
    up = (slots * rows * parts * rank for rows, _, parts in shapes)
    return spec.num_layers * (sum(down) + sum(up))


def layer_bytes(spec: ModelSpec, compiled: bool = True, lora_rank: int = 0) -> int:
    """What one token leaves behind in one layer for the backward pass, in bfloat16.

    States: the layer's input, its norm, the output of attention's projection, the sum and its norm;
    not compiled, what each norm scales too, and the sum alone. Attention: queries, keys and values
    as they are rotated, the mixed values, and in float32 a normaliser of each head; where queries
    and keys are normalised also before and after it. MLP: gate, up and their product; not compiled,
    the activated gate too. The float32 norm of each row that is normalised. A norm of what a half
    adds keeps its input, and without one before the half its input is the sum.
    """
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    visited = spec.moe.top_k * spec.moe.intermediate if spec.moe else 0
    inner = max(spec.intermediate, visited)
    before, after = (sum(map(bool, spec.norms[i::2])) for i in (0, 1))
    rows, widths = before + after, 3 if compiled else 4
    if compiled:
        states = 2 + 3 * before // 2 + after
    else:
        states = 2 + (1 if lora_rank else 2) * rows  # norms of a frozen base have no gradient
    wide = states * spec.hidden + widths * inner + spec.qkv_rows + heads
    if spec.qk_norm:
        wide += (1 if spec.qk_norm_whole and compiled else 2) * (heads + kv)
        rows += 2 if spec.qk_norm_whole else spec.num_heads + spec.num_kv_heads
    wide += 7 * lora_rank  # what lies between the two halves of each adapter
    return 2 * wide + 4 * (rows * (1 if compiled else 2) + spec.num_heads)


def logits_bytes(spec: ModelSpec, chunk: int, trained: bool) -> int:
    """A chunk's logits and their gradient; the output matrix cast, and if it is trained its
    gradient and a chunk's part of that."""
    matrix = spec.vocab * spec.hidden
    return chunk * spec.vocab * (4 + 4 + 2) + matrix * (2 + (4 + 2 if trained else 0))


def working_bytes(need: Need, checkpointing: str, pack: int, chunk: int) -> int:
    """The learner's memory beside its state, at the peak of a pack."""
    spec, tokens, item = need.spec, max(pack, need.request_tokens_max), need.compute_bytes
    each = layer_bytes(spec, need.compiled, need.lora_rank) * item // 2
    # Weights that are cast where they are used are kept for the backward pass.
    cast = 0 if need.lora_rank and need.base_bytes == item else item * body_params(spec)
    if checkpointing == "none":
        saved, again = tokens * each * spec.num_layers + cast, 0
    else:
        saved = tokens * spec.num_layers * spec.hidden * item
        again = tokens * 2 * each + cast // spec.num_layers
    ends = tokens * spec.hidden * item * 5  # final states and their gradients
    logits = logits_bytes(spec, min(chunk, tokens), trained=not need.lora_rank)
    return int(FRAGMENTED * (saved + ends + max(logits, again)))


def trained_params(need: Need) -> int:
    return adapter_params(need.spec, need.lora_rank) if need.lora_rank else num_params(need.spec)


def recheck_bytes(need: Need, pack: int, chunk: int) -> int:
    """A frozen version and one layer of a pack that it reads, or its logits, in the place of the
    gradients: what more that takes than the learner's state."""
    if not need.rechecks:
        return 0
    spec, tokens = need.spec, max(pack, need.request_tokens_max)
    twin = need.compute_bytes * num_params(spec)
    layer = tokens * layer_bytes(spec) * need.compute_bytes // 2
    logits = min(chunk, tokens) * spec.vocab * (4 + 4)
    gradients = 4 * trained_params(need) // need.num_ranks
    return int(FRAGMENTED * (twin + max(layer, logits))) - gradients


def state_lines(need: Need) -> list[Line]:
    """What the learner holds all the time."""
    spec, who = need.spec, need.learner_name
    params, ranks, trained = num_params(spec), need.num_ranks, trained_params(need)
    teacher = num_params(need.teacher) if need.teacher is not None else 0
    kind = "float32" if need.base_bytes == 4 else "as it computes"
    # Of several ranks two layers and the matrices at the ends are whole while they compute.
    whole = 2 * body_params(spec) // spec.num_layers + params - body_params(spec)
    sizes = {
        "context": CONTEXT_BYTES,
        f"frozen base ({kind})": need.base_bytes * params // ranks if need.lora_rank else 0,
        "masters (float32)": 4 * trained // ranks,
        "gradients (float32)": 4 * trained // ranks,
        "moments (float32)": 8 * trained // ranks,
        f"frozen copies: {need.num_twins}": need.num_twins * need.compute_bytes * params,
        "frozen teacher": need.compute_bytes * teacher,
        "critic: masters, gradients, moments": 16 * params // ranks if need.critic else 0,
        "parts gathered from other ranks": (need.compute_bytes + 4) * whole if ranks > 1 else 0,
    }
    return [Line(who, what, num_bytes) for what, num_bytes in sizes.items() if num_bytes]


def engine_lines(need: Need, who: str, versions: int, requests: int, kv: int) -> list[Line]:
    spec = need.spec
    weights = need.item_bytes * num_params(spec)
    what, held = (
        "weights" if versions == 1 else f"weights of {versions} versions",
        versions * weights,
    )
    if need.lora_rank and need.adapters:
        adapters = need.item_bytes * slots_params(spec, need.lora_rank, versions)
        what, held = f"base and {versions} adapters", weights + adapters
    tokens = kv // spec.kv_token_bytes(need.item_bytes, need.routing)
    return [
        Line(who, "context", CONTEXT_BYTES),
        Line(who, what, held),
        Line(who, "graphs and workspace", graph_bytes(need, versions, requests)),
        Line(who, f"KV cache: {tokens:,} tokens", kv),
    ]


def decoded_at_once(need: Need, kv: int) -> int:
    """Requests that such a cache is enough for, most of them far from their full length."""
    each = max(16, min(DECODED_TOKENS_MIN, need.request_tokens_max // 4))
    return max(8, kv // (each * need.spec.kv_token_bytes(need.item_bytes, need.routing)))


def graph_bytes(need: Need, versions: int, requests: int) -> int:
    """Captured decode steps share one pool; a prefill has its own rows and 512 rows of logits."""
    spec = need.spec
    row = spec.vocab * 10 + 2 * (2 * spec.intermediate + spec.qkv_rows + 4 * spec.hidden)
    step = need.step_tokens_max * 2 * (2 * spec.intermediate + spec.qkv_rows + 6 * spec.hidden)
    slots = 1 if need.lora_rank and need.adapters else versions
    return int(20e6 + requests * slots * row + 512 * spec.vocab * 4 + step)


def plan_memory(need: Need, total_bytes: int) -> MemoryPlan:
    """The fastest division that fits; where none does, the smallest one, with `fits` False."""
    plan = None
    for plan in _divisions(need, total_bytes):
        if plan.fits:
            break
    assert plan is not None
    return plan


def _divisions(need: Need, total_bytes: int) -> Iterator[MemoryPlan]:
    """The fastest first, the smallest last."""
    engines = need.num_instances > 0 or need.evaluator
    for stage in STAGES:
        fewer = (
            () if need.versions_fixed else range(need.versions_max - 1, stage.versions_min - 1, -1)
        )
        for versions in (need.versions_max, *fewer):
            for share in stage.kv_shares if engines else stage.kv_shares[-1:]:
                for way in _ways(need, stage.pack_min):
                    yield _divide(need, total_bytes, versions, share, way, stage)


Way = tuple[str, int, int]  # checkpointing, tokens of a pack, tokens of a chunk


def _ways(need: Need, pack_min: int) -> Iterator[Way]:
    """A smaller chunk costs less speed than a small pack, the smallest more."""
    if not need.learner:
        yield "none", 0, 0
        return
    chunks = [need.chunk_tokens or max(64, n // need.spec.vocab) for n in CHUNK_ELEMENTS]
    every = (
        (need.checkpointing or checkpointing, need.pack_tokens or pack, chunk)
        for ways, some in ((WAYS[:3], chunks[:1]), (WAYS, chunks[:-1]), (WAYS, chunks[-1:]))
        for checkpointing, pack in ways
        if pack >= pack_min
        for chunk in some
    )
    yield from dict.fromkeys(every)


def _learner_lines(need: Need, way: Way, handover: bool) -> Iterator[Line]:
    checkpointing, pack, chunk = way
    yield from state_lines(need)
    if handover:
        size = shelf_bytes(num_params(need.spec), need.item_bytes)
        yield Line(need.learner_name, "the version that instances take over, exactly", size)
    how = "recomputed by layer" if checkpointing == "layer" else "all kept"
    peak, what = working_bytes(need, *way), f"a pack of {pack:,} tokens, {how}; logits"
    twin = recheck_bytes(need, pack, chunk)
    if twin > peak:
        peak, what = twin, "a frozen version (audit.recompute_share), or a pack"
    yield Line(need.learner_name, what, peak)


def _divide(
    need: Need, total_bytes: int, versions: int, share: float, way: Way, stage: Stage
) -> MemoryPlan:
    """Fixed parts first, then KV: its share at least, more where there is more."""
    room = int(total_bytes * (1.0 - RESERVE_SHARE))
    lines: list[Line] = []
    checkpointing, pack, chunk = way
    handover = stage.handover if need.handover is None else need.handover
    handover = handover and need.learner and need.num_instances > 0 and not need.lora_rank
    if need.others_bytes:
        lines.append(Line("others", "in use by other programs", need.others_bytes))
    if need.learner:
        lines += _learner_lines(need, way, handover)
    token = need.spec.kv_token_bytes(need.item_bytes, need.routing)
    full = token * need.request_tokens_max
    beside = max(1, min(need.evaluator_requests, EVALUATOR_REQUESTS) // stage.evaluator_part)
    rows = max(beside, min(need.step_tokens_max, EVALUATOR_STEP_TOKENS) // stage.evaluator_part)
    evaluator_kv = max(2 * full, int(share / 2 * beside * full)) if need.evaluator else 0
    if need.evaluator:
        its = replace(need, lora_rank=0, step_tokens_max=rows)
        lines += engine_lines(its, "evaluator", 1, beside, evaluator_kv)
    names = need.names or tuple(f"instance{index}" for index in range(need.num_instances))
    wanted = full * need.num_requests
    kv = need.kv_bytes or max(2 * full, int(share * wanted))
    decoded = min(need.num_requests, decoded_at_once(need, kv))
    engines = [line for name in names for line in engine_lines(need, name, versions, decoded, 0)]
    left = room - sum(line.num_bytes for line in [*lines, *engines])
    if names and not need.kv_bytes:
        kv = min(max(2 * full, wanted), max(kv, left // len(names)))
    for name in names:
        lines += engine_lines(need, name, versions, decoded, kv)
    return MemoryPlan(
        total_bytes=total_bytes,
        lines=tuple(lines),
        kv_bytes=kv,
        num_requests=decoded,
        evaluator_kv_bytes=evaluator_kv,
        evaluator_requests=beside,
        evaluator_step_tokens=rows,
        pack_tokens=pack,
        checkpointing=checkpointing,
        chunk_tokens=chunk,
        versions_max=versions,
        handover=handover,
        fits=sum(line.num_bytes for line in lines) <= room,
    )
