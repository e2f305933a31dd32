"""The choice of the rollout engine, and what it says when it cannot be made."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dora_rl.config import RunConfig
from dora_rl.runtime.engines import adapter_rank, check_backend, resident_limit
from dora_rl.types import UserError


def config(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "somewhere"}} | sections)


def test_vllm_holds_one_version_or_adapters() -> None:
    native, vllm = config(), config(rollout={"backend": "vllm"})
    lora = {"lora_rank": 4}
    assert resident_limit(native, 3) == 3
    assert resident_limit(vllm, 3) == 1
    assert resident_limit(config(rollout={"backend": "vllm"}, trainer=lora), 3) == 3
    assert adapter_rank(config(trainer=lora)) == 4
    assert adapter_rank(config(trainer=lora | {"lora_publish": "merged"})) == 0


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_missing_vllm_is_one_line() -> None:
    check_backend(config())
    with pytest.raises(UserError, match="not installed here"):
        check_backend(config(rollout={"backend": "vllm"}))
