"""Updates: documents in, packs run as they fill, one gradient applied at the end of each.

Holds every model of a learner: policy, adapters, reference, critic, optimizers. Never updates from
a non-finite loss or gradient (the update is skipped and counted), and never scores old log-probs
under weights in motion. Invariants: the gradient applied is that of the whole update's loss,
whatever the packs it was cut into, and however often memory ran out meanwhile; reference and critic
start from exactly the weights that the run starts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dora_rl.config import TrainerConfig
from dora_rl.out_of_memory import free_cached, maybe_fail
from dora_rl.ports import WeightStore
from dora_rl.trainer import distributed
from dora_rl.trainer.documents import (
    Document,
    collate,
    pack_balanced,
    pack_stream,
    quadratic_tokens,
)
from dora_rl.trainer.losses.registry import Objective
from dora_rl.trainer.memory import Room, keep_freed_memory, noting_shortage
from dora_rl.trainer.meters import Meters
from dora_rl.trainer.optim import Optimizer, learning_rate
from dora_rl.trainer.passes import critic_pass, empty_pass, policy_pass
from dora_rl.trainer.policy.lora import add_lora
from dora_rl.trainer.policy.model import (
    Critic,
    Policy,
    clone_adapted,
    clone_architecture,
    copy_weights,
    freeze,
    load_policy,
)
from dora_rl.trainer.scoring import SealedScorer, Teacher, score
from dora_rl.types import StepIndex, UserError, Version
from dora_rl.user_code import require

_PACK_TOKENS = {"cpu": 4096, "cuda": 32768}


class OpenUpdate:
    """What the update being filled has seen so far; denominators are known only at its end."""

    def __init__(self, device: torch.device) -> None:
        self.num_groups = self.num_tokens = self.num_sequences = 0
        self.forget_passes(device)

    def forget_passes(self, device: torch.device) -> None:
        """As if no pack had been run."""
        self.loss = torch.zeros((), device=device)
        self.meters = Meters(device)  # of its packs
        self.documents: list[Document] = []  # that were run


class Updates:
    """The models of one rank, and the update that is open."""

    def __init__(
        self,
        model: Path | Policy,
        objective: Objective,
        trainer: TrainerConfig,
        store: WeightStore | None,
    ) -> None:
        self.objective, self.options = objective, trainer
        if trainer.threads:
            torch.set_num_threads(trainer.threads)
        self.directory = model if isinstance(model, Path) else None
        policy = load_policy(model, trainer) if isinstance(model, Path) else model
        self.policy, self.device = policy, next(policy.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.rank, self.num_ranks = distributed.world()
        self.room = Room(
            trainer.pack_tokens or _PACK_TOKENS.get(self.device.type, 16384), self.note_shortage
        )
        self.notes: list[str] = []  # for whoever watches the run
        make_twin = partial(clone_architecture, policy, trainer, self.directory)
        self.scorer = SealedScorer(
            store.open if store is not None else None,
            make_twin,
            partial(clone_adapted, policy, trainer, self.directory),
            objective.options.temperature,
            self.room,
        )
        # Copies are taken before adapters are added and before anything is sharded.
        self.reference = self._make_reference() if objective.needs_reference else None
        self.critic = Critic(make_twin(), policy) if objective.needs_critic else None
        self.teacher = self._make_teacher() if trainer.teacher_model else None
        if trainer.lora_rank:
            add_lora(policy, trainer)
        if self.num_ranks > 1:
            distributed.shard(policy, policy.blocks, policy.compute_dtype)
            if self.critic is not None:
                distributed.shard(self.critic, self.critic.body.blocks, policy.compute_dtype)
        self.optimizer, critic_lr = Optimizer(policy, trainer), objective.options.critic_lr
        self.critic_optimizer = self.critic and Optimizer(self.critic, trainer, critic_lr)
        self.meters = Meters(self.device)
        self.step: StepIndex | None = None
        self.num_updates = self._updates_in_step = 0
        self.num_skipped, self.skip_reason = 0, ""  # updates in a row
        self._pending: list[Document] = []
        self._update = OpenUpdate(self.device)

    def _make_reference(self) -> Policy:
        options = self.options
        if options.reference_model:
            reference = freeze(load_policy(Path(options.reference_model), options))
            reference.replays = False  # it says what it would do itself
            return reference
        twin = self.scorer.make_twin()
        twin.replays = False
        copy_weights(twin, self.policy)
        if options.lora_rank and options.lora_publish == "adapters":
            add_lora(twin, options)  # new ones add nothing, in the policy's own order of sums
        return freeze(twin)

    def _make_teacher(self) -> Teacher:
        """Its vocabulary may be padded further than the policy's."""
        directory, vocab = self.options.teacher_model, self.policy.vocab
        options = self.objective.options
        teacher = freeze(load_policy(Path(directory), self.options))
        teacher.replays = False
        require(
            (
                teacher.vocab >= vocab,
                f"trainer.teacher_model: {directory} has {teacher.vocab} tokens, the model has "
                f"{vocab}; give one with the same tokenizer",
            )
        )
        return Teacher(teacher, options.temperature, self.room, options.distill_top_k)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The policy's, and the critic's where there is one."""
        return [o for o in (self.optimizer, self.critic_optimizer) if o is not None]

    @property
    def pack_tokens(self) -> int:
        """Of one pack; fewer once memory has run out."""
        return self.room.pack_tokens

    @property
    def holds_gradients(self) -> bool:
        """From the first pack of an update until it is applied."""
        return any(p.grad is not None for p in self.optimizer.parameters)

    def skipped_too_many(self) -> bool:
        """Whether so many updates in a row were skipped that no more are worth a try."""
        return self.num_skipped >= self.options.skipped_updates_max

    def raise_skipped(self) -> None:
        raise UserError(
            f"{self.num_skipped} updates in a row were skipped (trainer.skipped_updates_max): "
            f"{self.skip_reason}; look at the rewards, algorithm.loss and trainer.lr, then --resume"
        )

    def enqueue(self, documents: Sequence[Document], num_groups: int) -> None:
        update = self._update
        update.num_groups += num_groups
        update.num_sequences += sum(d.is_first for d in documents)
        update.num_tokens += sum(d.num_trained for d in documents)
        self.meters.count("train/tokens", sum(d.num_tokens for d in documents))
        self.meters.count("train/tokens_written", sum(d.num_trained for d in documents))
        self.meters.count("train/rows", len(documents))
        if self.policy.arch is not None:
            trained = self.optimizer.parameters if self.options.lora_rank else ()
            adapters = sum(p.numel() for p in trained)
            self.meters.count(
                "train/flops",
                self.policy.arch.train_flops([d.num_tokens for d in documents], adapters),
            )
        may_skip = self.objective.may_skip_zero_advantage and not self.options.router_aux_coef
        for d in documents:
            if may_skip and not bool(d.advantages.any()):
                self.meters.count("train/tokens_skipped", d.num_tokens)
            else:
                self._pending.append(d)

    def score_reference(self, documents: Sequence[Document]) -> None:
        unscored = [d for d in documents if d.ref_logprobs is None]
        if self.reference is None or not unscored:
            return
        options = self.objective.options
        found = score(
            self.reference,
            unscored,
            options.temperature,
            self.room,
            # A penalty in the reward is taken off on the host, before there are advantages.
            on_device=options.kl_in != "reward",
        )
        for d, logprobs in zip(unscored, found, strict=True):
            d.ref_logprobs = logprobs

    def run_packs(self, flush: bool) -> None:
        """Run the packs that are full; with `flush` also what is left over.

        Where memory runs out, all of the update is run again in smaller packs: what a backward pass
        that failed has added to the gradients cannot be taken out of them.
        """
        while packs := self._next_packs(flush):
            for place, documents in enumerate(packs):
                with noting_shortage() as missing:
                    self._run_pack(documents)
                    self._update.documents += documents
                if missing:
                    waiting = [d for pack in packs[place:] for d in pack]
                    self._pending = [*self._update.documents, *waiting, *self._pending]
                    self.make_room([d.num_tokens for d in documents], missing[0])
                    break
            else:
                return

    def _next_packs(self, flush: bool) -> list[list[Document]]:
        """Taken from what is pending. With several ranks a pack is run by each: the same plan
        everywhere, each takes its own."""
        pending, lengths = self._pending, [d.num_tokens for d in self._pending]
        if self.num_ranks > 1:
            if not lengths or not (flush or sum(lengths) >= self.num_ranks * self.pack_tokens):
                return []
            arch, quadratic = self.policy.arch, 8192.0  # any figure will do
            if arch is not None:
                width = arch.num_heads * arch.head_dim
                quadratic = quadratic_tokens(width, arch.layer_params_active())
            packs = pack_balanced(lengths, self.pack_tokens, self.num_ranks, quadratic)
            packs, rest = packs[self.rank :: self.num_ranks], []
        else:
            packs, rest = pack_stream(lengths, self.pack_tokens)
            if flush and rest:
                packs, rest = [*packs, rest], []
        self._pending = [pending[i] for i in rest]
        return [[pending[i] for i in indices] for indices in packs]

    def make_room(self, lengths: Sequence[int], missing: str) -> None:
        """A pack of such documents did not fit: drop the gradients and whatever torch holds on to,
        and let the next packs be smaller. Raises where nothing is smaller."""
        require(
            (
                self.num_ranks == 1,  # the others are in the middle of a collective
                f"out of memory in a pack of {sum(lengths):,} tokens ({missing}); set "
                f"trainer.pack_tokens below {self.pack_tokens}, then --resume",
            )
        )
        recomputed = bool(self.policy.checkpointing) or self.room.recomputes(sum(lengths))
        self.room.shrink(lengths, missing, recomputed=recomputed)
        self._update.forget_passes(self.device)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        free_cached()

    def note_shortage(self, line: str) -> None:
        self.notes.append(line)
        self.meters.count("memory/retries")

    def _run_pack(self, documents: list[Document]) -> None:
        if not documents:
            empty_pass(self.policy, self.critic)
            return
        assert self.step is not None
        maybe_fail("pack")
        self._fill_old(documents)
        self.score_reference(documents)
        pack, update, teacher = collate(documents, self.device), self._update, None
        if self.teacher is not None and self.objective.distils_in_loss:
            teacher = self.teacher.logits(pack)
        elif self.teacher is not None:
            self.teacher.fill_logprobs(documents)
        with self._recomputing(pack.layout.num_tokens):
            loss = policy_pass(self.policy, pack, self.objective, update.meters, self.step, teacher)
            update.loss = update.loss + loss
            if self.critic is not None:
                loss = critic_pass(self.critic, pack, self.objective.options, update.meters)
                update.loss = update.loss + loss * 0.0  # poisoned, where it is not finite
        update.meters.count("train/packs")

    @contextmanager
    def _recomputing(self, num_tokens: int) -> Iterator[None]:
        """A pack of so many tokens computes its layers again if it has to."""
        switched = not self.policy.checkpointing and self.room.recomputes(num_tokens)
        bodies = [self.policy, *([self.critic.body] if self.critic is not None else [])]
        for body in bodies if switched else ():
            body.checkpointing = True
        try:
            yield
        finally:
            for body in bodies if switched else ():
                body.checkpointing = False

    def _fill_old(self, documents: Sequence[Document]) -> None:
        """Old log-probs: the engine's, or this engine's under a sealed version. Before the step's
        first update the live weights *are* version `step`, at rest; `None` says to use them."""
        assert self.step is not None
        kind = self.objective.options.old_logprobs
        at_rest = self._updates_in_step == 0
        sealed: list[tuple[Document, Version]] = []
        for d in documents:
            version = self.step if kind == "proximal" else d.version
            # No single version gave a mixed trajectory its tokens; only the engine knows them.
            if kind == "rollout" or (kind == "behaviour" and d.mixed_versions is not None):
                d.old_logprobs = d.rollout_logprobs
            elif not (at_rest and version == self.step):
                sealed.append((d, version))
        found = self.scorer.score([d for d, _ in sealed], [v for _, v in sealed], on_device=True)
        for (d, _), logprobs in zip(sealed, found, strict=True):
            d.old_logprobs = logprobs

    def end_update(self) -> None:
        self.run_packs(flush=True)
        update, self._update = self._update, OpenUpdate(self.device)
        self.meters.add(update.meters)
        self._updates_in_step += 1
        if not update.num_sequences:
            self.meters.count("update/empty")
            return
        den = self.objective.denominator(update.num_tokens, update.num_sequences)
        total = distributed.add_up(update.loss)
        norm = self.optimizer.apply(self.num_ranks / den, self.num_updates, total)
        if self.critic_optimizer is not None:
            scale = self.num_ranks / update.num_tokens
            # The two move together or not at all.
            poisoned = total if norm is not None else total * float("nan")
            critic_norm = self.critic_optimizer.apply(scale, self.num_updates, poisoned)
            if critic_norm is not None:
                self.meters.add_sum("critic/grad_norm", torch.tensor(critic_norm), 1)
        if norm is None:
            self._note_skipped(total)
            return
        self.num_skipped = 0
        self.meters.count("update/applied" if norm else "update/without_gradient")
        self.meters.add_sum("grad_norm", torch.tensor(norm), 1)
        self.meters.add_sum("lr", torch.tensor(learning_rate(self.options, self.num_updates)), 1)
        self.meters.add_sum("loss", total / den, 1)
        self.num_updates += 1

    def _note_skipped(self, loss: Tensor) -> None:
        self.num_skipped += 1
        self.meters.count("update/skipped_non_finite")
        finite = bool(torch.isfinite(loss))
        what = "the gradient is not finite" if finite else f"the loss is {float(loss):g}"
        self.skip_reason = f"in step {self.step} {what}"
