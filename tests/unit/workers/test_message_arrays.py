"""Which fields of a message travel as arrays, whatever numpy and Python make of `NDArray`."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from dora_rl.core.actions import Feed
from dora_rl.types import RequestId
from dora_rl.workers.messages import Fed, ints, is_array, pack, unpack

T = TypeVar("T", bound=np.generic)
# As numpy has it from 2.5 on with Python 3.12: an alias that `get_origin` does not look through.
Alias = TypeAliasType("Alias", np.ndarray[Any, np.dtype[T]], type_params=(T,))


@pytest.mark.parametrize("hint", [NDArray[Any], np.ndarray, Alias[np.int32]])
def test_an_array_is_known_as_one(hint: Any) -> None:
    assert is_array(hint)


@pytest.mark.parametrize("hint", [int, str, RequestId, tuple[int, ...], list[int]])
def test_nothing_else_is(hint: Any) -> None:
    assert not is_array(hint)


def test_arrays_come_as_they_went() -> None:
    said = Fed(Feed(3, 0, 5, 2, (1,)), 2, 4, ints([7, 8, 9]), rewards=(0.5,))
    heard = unpack(pack(said))
    assert isinstance(heard, Fed) and heard.prompt_ids.tolist() == [7, 8, 9]
    assert (heard.action, heard.batch_groups, heard.updates, heard.rewards) == (
        Feed(3, 0, 5, 2, (1,)),
        2,
        4,
        (0.5,),
    )
