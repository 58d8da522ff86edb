"""Tensor maps: how Hopper's copy engine finds a box of a tensor."""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from tokenspeed_cuda.driver import checked, cuda_driver
from tokenspeed_cuda.launch import planned_arch

_KINDS = {1: "UINT8", 2: "BFLOAT16", 4: "FLOAT32"}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


@dataclass(frozen=True)
class TensorMap:
    """An argument of an entry, `const __grid_constant__ TensorMap` there; 128 bytes."""

    data: bytes

    def __bytes__(self) -> bytes:
        return self.data


def tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 128, promotion: int = 256) -> TensorMap:
    """A map of `tensor` (uint8 or float8, bfloat16, float32; at most 5 dims, the last contiguous) for copies of `box`.

    `box` in elements, dims in the tensor's order; `swizzle` 0, 32, 64 or 128 bytes, which is then the most that the
    last dim of the box may have; `promotion` 128 or 256, the bytes that the L2 cache then fetches. What lies outside
    the tensor reads as zero. Raises `RuntimeError` for what the driver refuses, for example strides that are no
    multiples of 16 bytes.
    """
    if planned_arch() is not None:
        return TensorMap(bytes(128))
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    return _encoded(tensor.data_ptr(), size, tuple(tensor.shape), strides, box, swizzle, promotion)


@lru_cache(maxsize=4096)
def _encoded(
    pointer: int,
    itemsize: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    promotion: int,
) -> TensorMap:
    driver = cuda_driver()
    made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_KINDS[itemsize]}"),
        len(shape),
        pointer,
        [driver.cuuint64_t(size) for size in reversed(shape)],
        [driver.cuuint64_t(stride) for stride in reversed(strides[:-1])],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle]}"),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{promotion}B"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    found = checked(made, f"tensor map of {shape}, box {box}, swizzle {swizzle}")
    return TensorMap(ctypes.string_at(found.getPtr(), 128))
