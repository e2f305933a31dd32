"""How an error says that memory ran out, and faults that a test asks for."""

from __future__ import annotations

import pytest
import torch

from dora_rl.out_of_memory import Faults, arm, maybe_fail, shortage


def test_a_shortage_is_known_by_its_type_or_words() -> None:
    assert shortage(torch.OutOfMemoryError("CUDA out of memory.\n Tried")) == (
        "CUDA out of memory. Tried"
    )
    assert shortage(RuntimeError("CUDA error: out of memory"))
    assert shortage(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert shortage(RuntimeError("CUDA error: an illegal memory access")) == ""


def test_a_fault_comes_once_at_its_call_in_its_role() -> None:
    faults = Faults("learner", "learner:pack:2 instance:pack:1 learner:score:1")
    faults.count("pack")
    with pytest.raises(torch.OutOfMemoryError) as told:
        faults.count("pack")
    assert shortage(told.value)
    faults.count("pack")
    with pytest.raises(torch.OutOfMemoryError):
        faults.count("score")
    with pytest.raises(AssertionError, match="none of"):
        Faults("learner", "learner:nowhere:1")


def test_without_the_variable_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DORA_RL_MEMORY_FAULTS", raising=False)
    arm("learner")
    maybe_fail("pack")
