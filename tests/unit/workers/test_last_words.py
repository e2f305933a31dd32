"""Why a worker ended, in one line that names memory where memory was it."""

from __future__ import annotations

import pytest
import torch

from dora_rl.workers.last_words import last_words, why_ended

# As torch 2.11 to 2.13 put it.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.44 GiB is free. Process 7 has 40.12 GiB memory in use. Including non-PyTorch memory, "
    "this process has 68.02 GiB memory in use. Of the allocated memory 60 GiB is allocated by "
    "PyTorch, and 7 GiB is reserved by PyTorch but unallocated.\nSee documentation"
)


def test_a_full_gpu_is_named_with_its_numbers() -> None:
    said = last_words(torch.OutOfMemoryError(CUDA))
    assert said.startswith(
        "out of memory on the GPU: 2.25 GiB more were wanted, 1.44 GiB of 139.80 GiB are free, "
        "this process has 68.02 GiB; lower "
    )
    assert "\n" not in said
    bare = last_words(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."))
    assert bare.startswith("out of memory on the GPU; lower ")


def test_a_full_host_is_named_with_its_numbers() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52, dtype=torch.uint8)  # more than any machine has
    assert last_words(caught.value).startswith(
        "out of memory on the host: 4194304.00 GiB more were wanted; free memory"
    )
    assert last_words(MemoryError()).startswith("out of memory on the host; ")


def test_anything_else_is_its_kind_and_first_line() -> None:
    assert last_words(ValueError("no such\nthing")) == "ValueError: no such"


@pytest.mark.parametrize(
    ("said", "status", "why"),
    [
        ("out of memory", -9, "out of memory"),
        ("", -9, "its process ended by SIGKILL, as the system does when memory runs out"),
        ("", -11, "its process ended by SIGSEGV"),
        ("", 1, "its process ended"),
        ("", None, "its process ended"),
    ],
)
def test_what_it_said_comes_before_what_the_system_says(
    said: str, status: int | None, why: str
) -> None:
    assert why_ended(said, status) == why
