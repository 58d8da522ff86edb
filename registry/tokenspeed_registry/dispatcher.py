"""What stands behind one public op: its kernels, the table of choices made so far, and the slow path."""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tokenspeed_registry import self_check
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.current_device import launcher
from tokenspeed_registry.dispatch import build, generate, without_hand_over
from tokenspeed_registry.errors import NoKernelError, TokenspeedError
from tokenspeed_registry.guard import Guard, build_guard
from tokenspeed_registry.kernel import Kernel, Priority
from tokenspeed_registry.library import define
from tokenspeed_registry.platform import platform_of
from tokenspeed_registry.reference import copy_as_promised
from tokenspeed_registry.scope import current_scope, recording
from tokenspeed_registry.selection import Candidate, candidates, capturing, choose
from tokenspeed_registry.validation import check_out, signature_of

if TYPE_CHECKING:
    from tokenspeed_registry.registry import Registry


class Dispatcher:
    """`function` is the public op. `table` maps dispatch keys to kernels; `guard` adds to the key what depends on
    dynamic dims: the answers to the kernels' constraints on them. Both are replaced whole when the kernels change.
    `_resolved` remembers what calls with an explicit choice, under another platform or in a trace resolved to.
    """

    def __init__(self, contract: Contract, registry: "Registry") -> None:
        self.contract = contract
        self.kernels: tuple[Kernel, ...] = ()
        self.table: dict[Hashable, Callable[..., Any]] = {}
        self.guard: Guard | None = None
        self._resolved: dict[Hashable, Kernel] = {}
        self._registry = registry
        self._lock = threading.Lock()
        self._warned = False
        self._environment = {"dispatcher": self, "scope": current_scope, "registry": registry}
        library_op = define(registry.namespace, contract, lambda *args, **kwargs: self.eager(*args, **kwargs))
        tracing = {"is_compiling": torch.compiler.is_compiling, "copy_into": copy_as_promised, "library_op": library_op}
        self.source = generate(contract)
        function: Any = build(contract, self.source, self._environment | tracing)
        function.contract = contract
        function.bind = functools.partial(_bind, self)
        self.function = function

    @functools.cached_property
    def eager(self) -> Callable[..., Any]:
        """The public function without its hand-over to torch.library, made when a compiled graph first runs the op."""
        return build(self.contract, without_hand_over(self.contract, self.source), self._environment)

    def add_kernel(self, kernel: Kernel) -> None:
        with self._lock:
            self._replace((*self.kernels, kernel))

    def remove_kernel(self, kernel: Kernel) -> None:
        with self._lock:
            self._replace(tuple(known for known in self.kernels if known is not kernel))

    def reject(self, args: tuple[Any, ...]) -> NoReturn:
        """Raises the error that names what is wrong with a call which the fast checks refused."""
        signature_of(self.contract, self._arguments(args))
        raise TokenspeedError(f"{self.contract.name}: refused by the generated checks alone, a bug:\n{self.source}")

    def check_out(self, out: object, args: tuple[Any, ...]) -> None:
        check_out(self.contract, out, self._arguments(args))

    def resolve(self, key: Hashable, args: tuple[Any, ...], backend: str | None) -> Callable[..., Any]:
        """The slow path: a key not seen before, an explicit choice, or a trace."""
        scope = current_scope.get()
        table, resolved = self.table, self._resolved  # a choice made for these must not enter those that replace them
        choice = backend
        if choice is None and scope is not None:
            choice = scope.choice(self.contract.name)
        if choice is None:
            choice = self._configured()
        platform = scope and scope.platform
        chosen = resolved.get((key, choice, platform))
        if chosen is None:
            chosen = self.select(args, choice)
            if key is not None:
                # What only a capture decided, or a capture must decide anew, stays on this path.
                device = args[self._first].device
                if not capturing(device) and (chosen.graph_capturable or device.type != "cuda"):
                    resolved[key, choice, platform] = chosen
                    if choice is None and platform is None:
                        table[key] = launcher(chosen, self._first)
        if scope is None:
            return launcher(chosen, self._first)
        return recording(scope, self.contract, chosen, launcher(chosen, self._first))

    def select(self, args: tuple[Any, ...], choice: str | None) -> Kernel:
        """The kernel for a call's arguments. Raises `NoKernelError` or `UnknownNameError`."""
        self._registry.load_plugins()
        if choice is not None and not any(choice in (kernel.backend, kernel.name) for kernel in self.kernels):
            self._registry.load_plugins(unusable=True)  # so that the error says why the chosen backend cannot serve
            self._refuse_absent(choice)
        signature = signature_of(self.contract, self._arguments(args))
        device = args[self._first].device
        scope = current_scope.get()
        platform = (scope and scope.platform) or platform_of(device)
        registry, contract = self._registry, self.contract
        in_capture = capturing(device)
        refused = self_check.failures(registry, contract, self.kernels, platform, signature) | registry.unusable
        if in_capture:
            refused |= {k.name: "cannot be captured in a CUDA graph" for k in self.kernels if not k.graph_capturable}
        while True:
            found = candidates(contract, self.kernels, platform, signature, registry.evidence, refused)
            chosen = choose(contract.name, found, choice)
            reason = self_check.run(registry, contract, chosen, platform, device, signature, in_capture)
            if reason is None:
                break
            refused[chosen.kernel.name] = reason
        self._warn_of_reference(chosen, found, choice, device)
        return chosen.kernel

    def _refuse_absent(self, choice: str) -> None:
        """Raises for an explicit choice whose plugin could not be loaded, with the plugin's reason."""
        absent = [s for s in self._registry.plugins() if s.name == choice and s.reason and not s.kernels]
        if absent:
            raise NoKernelError(
                f"{self.contract.name}: the explicit choice {choice!r} cannot serve it", [absent[0].reason]
            )

    @functools.cached_property
    def _first(self) -> int:
        return [parameter.name for parameter in self.contract.parameters].index(self.contract.tensors[0].name)

    def _configured(self) -> str | None:
        kernels = self._registry.settings.kernels
        return kernels.get(self.contract.name, kernels.get("*"))

    def _arguments(self, args: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip((parameter.name for parameter in self.contract.parameters), args, strict=True))

    def forget(self) -> None:
        """Drops all choices made so far: the next calls select anew."""
        with self._lock:
            self.table, self._resolved = {}, {}

    def _replace(self, kernels: tuple[Kernel, ...]) -> None:
        self.kernels = kernels
        self.guard = build_guard(self.contract, kernels)
        self.table, self._resolved = {}, {}

    def _warn_of_reference(
        self, chosen: Candidate, found: list[Candidate], choice: str | None, device: torch.device
    ) -> None:
        on_host = device.type == "cpu"
        if self._warned or on_host or choice is not None or chosen.kernel.priority != Priority.REFERENCE:
            return
        self._warned = True
        reasons = "\n  ".join(candidate.line() for candidate in found)
        message = f"{self.contract.name} falls back to the slow reference on {device}:\n  {reasons}"
        warnings.warn(message, RuntimeWarning, stacklevel=5)


def _bind(dispatcher: Dispatcher, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    call = inspect.signature(dispatcher.function).bind(*args, **kwargs)
    call.apply_defaults()
    backend, out = call.arguments.pop("backend"), call.arguments.pop("out", None)
    ordered = tuple(call.arguments.values())
    signature_of(dispatcher.contract, call.arguments)
    if out is not None:
        dispatcher.check_out(out, ordered)
    chosen = dispatcher.resolve(None, ordered, backend)
    contract = dispatcher.contract
    empty = inspect.Parameter.empty
    defaults: dict[str, Any] = {s.name: s.default for s in contract.scalars if s.keyword and s.default is not empty}
    defaults |= {tensor.name: None for tensor in contract.tensors if tensor.keyword and tensor.omissible}
    # A kernel's own signature need not repeat the op's defaults.
    return functools.partial(chosen, **defaults) if defaults else chosen
