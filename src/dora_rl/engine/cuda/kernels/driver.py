"""Kernels in CUDA C, compiled when they are first needed: by NVRTC, through cuda-bindings.

Both come with torch's CUDA builds, so that nothing is to be installed and no compiler is needed.
For what Triton cannot say; what uses it has another way where `is_here` says no.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int, c_void_p
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dora_rl.engine.cuda.kernels.overlap import is_hopper

logger = logging.getLogger(__name__)


class Kernel(NamedTuple):
    """A loaded function with what its launches have in common."""

    function: Any
    num_threads: int
    shared_bytes: int


def is_here() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


@lru_cache
def _driver() -> Any:
    return import_module("cuda.bindings.driver")


def _checked(result: Sequence[Any]) -> Any:
    """What a call of cuda-bindings gave beside its status."""
    if result[0].value != 0:
        raise RuntimeError(f"CUDA: {result[0].name}")
    return result[1] if len(result) == 2 else None


def can_run(device: torch.device, make: Callable[[], Kernel], instead: str) -> bool:
    """Whether a kernel for a Hopper can be used there; a failure to make it is said once."""
    if not is_hopper(device) or not is_here():
        return False
    try:
        make()
    except (ImportError, RuntimeError) as error:
        logger.warning("no kernels in CUDA C, which leaves %s: %s", instead, error)
        return False
    return True


def compile_source(source: str, defines: Mapping[str, int]) -> bytes:
    """Machine code for a Hopper. Needs no GPU."""
    nvrtc: Any = import_module("cuda.bindings.nvrtc")
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    options += [f"-D{name}={int(value)}".encode() for name, value in defines.items()]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status.value != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def load(code: bytes, name: str, num_threads: int, shared_bytes: int) -> Kernel:
    """A function of `code` in the context that torch makes with its first tensor."""
    driver = _driver()
    torch.empty(1, device="cuda")
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return Kernel(function, num_threads, shared_bytes)


def tensor_map(
    data: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> Any:
    """How boxes of bfloat16 `data` are copied to shared memory, in swizzled rows of 128 bytes.

    Innermost dimension first; `strides` in elements, without the innermost one's.
    """
    driver = _driver()
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    return _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            data.data_ptr(),
            [wide(size) for size in sizes],
            [wide(stride * data.element_size()) for stride in strides],
            [narrow(size) for size in box],
            [narrow(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def launch(kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
    """On the current stream; may start while the kernel before it drains (`overlap.py`).

    An argument is a tensor (its address), a number or a tensor map.
    """
    driver = _driver()
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.num_threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    config.attrs, config.numAttrs = [early], 1
    values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
    kinds = tuple(_kind_of(argument) for argument in arguments)
    _checked(driver.cuLaunchKernelEx(config, kernel.function, (values, kinds), 0))


def _kind_of(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return c_void_p
    return {int: c_int, float: c_float}.get(type(argument))
