"""The CUDA driver through cuda-python, imported when first needed."""

from functools import cache
from typing import Any


@cache
def cuda_driver() -> Any:
    """`cuda.bindings.driver`. Raises `ImportError` without cuda-python."""
    from cuda.bindings import driver

    return driver


def checked(result: tuple[Any, ...], what: str) -> Any:
    """What a driver call gives beside its status. Raises `RuntimeError`, about `what`, where that is an error."""
    status, *values = result
    if status.value:
        raise RuntimeError(f"{what}: {status.name}")
    return values[0] if len(values) == 1 else values
