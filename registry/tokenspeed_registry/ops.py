"""The `op` decorator: declares an op in the default registry."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, Unpack, cast

from tokenspeed_registry.contract import Facts, Op, declare
from tokenspeed_registry.registry import Registry, default_registry

P = ParamSpec("P")
R = TypeVar("R")


def op(registry: Registry = default_registry, **facts: Unpack[Facts]) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turns an annotated reference function into a public op. `facts` are those of `contract.Contract`."""

    def decorate(function: Callable[P, R]) -> Op[P, R]:
        contract = declare(function, **facts)
        return cast("Op[P, R]", registry.add_op(contract).function)

    return decorate
