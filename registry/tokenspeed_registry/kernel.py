"""What a backend declares of a kernel: which op, where it runs, and every limit it has.

    @kernel(mla_decode, backend="cuda", requires=arch("sm_90a"), priority=Priority.TUNED, compiler="nvrtc",
            dtypes={"q": [torch.bfloat16]}, constraints=[Dim("q_len") <= 8])
    def mla_decode_wgmma(q, kv_cache, ..., out=None): ...

A kernel has its op's own signature without `backend`: it returns the outputs, in `out` where that is given. It gets
arguments that meet the contract and its constraints and checks nothing. Decorating registers nothing; the plugin
that lists the module does.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from tokenspeed_registry.constraints import Constraint, Dtype
from tokenspeed_registry.contract import Contract, Op
from tokenspeed_registry.errors import RegistrationError, UnknownNameError
from tokenspeed_registry.platform import PLATFORMS, Platform, known_platform
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.source_hash import source_file, source_hash


class Priority(IntEnum):
    """Bands that decide between kernels of which no times are known; a higher one wins."""

    REFERENCE = 0
    """The contract's own body: float64, slow."""
    EAGER = 100
    """Plain torch, on any device."""
    PORTABLE = 200
    """One source for every vendor."""
    TUNED = 300
    """Written for an arch."""
    SPECIALISED = 400
    """Written for an arch and a narrow range of shapes."""


@dataclass(frozen=True)
class Requirement:
    """What a platform must be: any of some archs or vendors (empty: any), with all of some features."""

    archs: frozenset[str] = frozenset()
    vendors: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    def describe(self) -> str:
        """In words, for example `arch sm_90a` or `any device`."""
        parts = {"arch": self.archs, "vendor": self.vendors, "features": self.features}
        return "; ".join(f"{name} {', '.join(sorted(of))}" for name, of in parts.items() if of) or "any device"

    def explain(self, platform: Platform) -> str | None:
        """Why the platform does not do; None where it does."""
        if self.archs and platform.arch not in self.archs:
            return f"needs arch {' or '.join(sorted(self.archs))}, got {platform.arch}"
        if self.vendors and platform.vendor not in self.vendors:
            return f"needs a device of {' or '.join(sorted(self.vendors))}, got {platform.vendor}"
        if missing := self.features - platform.features:
            return f"needs {', '.join(sorted(missing))}, which {platform.arch} lacks"
        return None


ANYWHERE = Requirement()


def arch(*names: str) -> Requirement:
    """Requires one of these archs. Raises `UnknownNameError` for one that the platform table does not have."""
    return Requirement(archs=frozenset(known_platform(name).arch for name in names))


def vendor(*names: str) -> Requirement:
    """Requires a device of one of these vendors: nvidia, amd or cpu. Raises `UnknownNameError` for any other."""
    _check_known("vendor", names, {platform.vendor for platform in PLATFORMS.values()})
    return Requirement(vendors=frozenset(names))


def feature(*names: str) -> Requirement:
    """Requires all of these features, for example "tma", "wgmma". Raises `UnknownNameError` for unknown ones."""
    _check_known("feature", names, {name for platform in PLATFORMS.values() for name in platform.features})
    return Requirement(features=frozenset(names))


def _check_known(what: str, names: tuple[str, ...], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A way to compute an op. `name` is unique in a registry; not `graph_capturable` excludes CUDA graphs.

    `compiler` names what turns the source into machine code ("triton", "cute", "nvrtc", "hiprtc"), None for kernels
    that only call torch: those run wherever torch does and need no evidence of their own. `sources` names files, beside
    the one that defines `function` and what that imports of its package, of which the kernel is made.
    """

    name: str
    op: str
    backend: str
    function: Callable[..., Any]
    requires: Requirement = ANYWHERE
    constraints: tuple[Constraint, ...] = ()
    priority: int = Priority.EAGER
    compiler: str | None = None
    graph_capturable: bool = True
    sources: tuple[str, ...] = ()

    @functools.cached_property
    def source_hash(self) -> str:
        """What evidence of this kernel is kept under; see `tokenspeed_registry.source_hash`."""
        return source_hash(self.function, self.sources)

    @property
    def on_host(self) -> tuple[str, ...]:
        """Placeable tensors that it takes in host memory, beside an accelerator."""
        return tuple(sorted(limit.name for limit in self.constraints if limit.kind == "host" and True in limit.bound))

    def refusals(self, platform: Platform, signature: Signature) -> tuple[bool | None, list[str]]:
        """Whether the kernel takes such a call (None: depends on what is not given), and the reasons if not True."""
        unfit = self.requires.explain(platform)
        if unfit is not None:
            return False, [unfit]
        reasons = {constraint: constraint.explain(signature) for constraint in self.constraints}
        failed = [reason for c, reason in reasons.items() if reason is not None and c.holds(signature) is False]
        undecided = [reason for c, reason in reasons.items() if reason is not None and c.holds(signature) is None]
        return (False, failed) if failed else (None, undecided) if undecided else (True, [])


def kernel(
    op: Op[..., Any],
    *,
    backend: str,
    name: str | None = None,
    requires: Requirement = ANYWHERE,
    dtypes: Mapping[str, Iterable[torch.dtype]] | None = None,
    constraints: Iterable[Constraint] = (),
    priority: int = Priority.EAGER,
    compiler: str | None = None,
    graph_capturable: bool = True,
    sources: Iterable[str] = (),
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declares the decorated function as a kernel of `op`. `name` defaults to `backend.op`.

    `dtypes` limits tensor parameters, `constraints` dims and flags. `sources` are files that the kernel is made of but
    does not import, relative to its own: `("csrc/decode.cu",)`. Raises `RegistrationError` for a function whose
    parameters are not the op's, for limits on names that the contract does not have, and for absent source files.
    """
    contract = op.contract
    limits = [Dtype(role).in_(*allowed) for role, allowed in (dtypes or {}).items()]
    limits += constraints

    def declare(function: Callable[..., Any]) -> Kernel:
        full_name = name or f"{backend}.{contract.name}"
        _check_parameters(contract, function, full_name)
        _check_limits(contract, limits, full_name)
        files = tuple(sources)
        _check_sources(function, files, full_name)
        return Kernel(
            name=full_name,
            op=contract.name,
            backend=backend,
            function=function,
            requires=requires,
            constraints=tuple(limits),
            priority=priority,
            compiler=compiler,
            graph_capturable=graph_capturable,
            sources=files,
        )

    return declare


def _check_parameters(contract: Contract, function: Callable[..., Any], name: str) -> None:
    expected = [(p.name, p.keyword) for p in contract.parameters] + ([("out", True)] if contract.outputs else [])
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    got = [(p.name, p.kind is keyword_only) for p in inspect.signature(function).parameters.values()]
    if got != expected:
        raise RegistrationError(f"kernel {name}: parameters {got} are not the op's {expected} (name, keyword only)")


def _check_limits(contract: Contract, limits: Iterable[Constraint], name: str) -> None:
    known = {
        "dim": contract.dims,
        "dtype": {tensor.name for tensor in contract.tensors},
        "given": {tensor.name for tensor in contract.tensors if tensor.optional},
        "flag": {scalar.name for scalar in contract.flags},
        "host": set(contract.placeable),
        "contiguous": set(contract.strided),
        "alignment": {tensor.name for tensor in contract.tensors},
    }
    for limit in limits:
        if limit.name not in known[limit.kind]:
            raise RegistrationError(f"kernel {name}: {contract.name} has no {limit.kind} {limit.name!r}")


def _check_sources(function: Callable[..., Any], sources: Iterable[str], name: str) -> None:
    file = source_file(function) if sources else None
    for source in sources:
        if file is None or not (file.parent / source).is_file():
            raise RegistrationError(f"kernel {name}: no source file {source!r} beside {file}")
