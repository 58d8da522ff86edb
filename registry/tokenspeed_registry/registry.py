"""The registry: ops and kernels by name, plugins loaded on first dispatch, one dispatcher an op."""

import difflib
import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tokenspeed_registry import self_check
from tokenspeed_registry.contract import Contract
from tokenspeed_registry.dispatcher import Dispatcher
from tokenspeed_registry.errors import RegistrationError, UnknownNameError
from tokenspeed_registry.evidence import EvidenceStore
from tokenspeed_registry.kernel import Kernel
from tokenspeed_registry.platform import Platform, assume_arch, present_platform
from tokenspeed_registry.plugins import PluginStatus, find_plugins, load_kernels
from tokenspeed_registry.record import Record
from tokenspeed_registry.reference import as_kernel
from tokenspeed_registry.scope import check_op_name, declared_ops
from tokenspeed_registry.selection import Candidate, candidates
from tokenspeed_registry.settings import Settings, read_settings
from tokenspeed_registry.signature import Signature


class Registry:
    """Thread-safe. `namespace` is that of the torch.library ops. The public API lives in `default_registry`.

    `unusable` maps kernels of plugins that cannot run here to the reason.
    """

    def __init__(self, namespace: str, settings: Settings | None = None, plugins: bool = True) -> None:
        self.namespace = namespace
        self._given = settings
        self.debug = settings is not None and settings.debug
        self._dispatchers: dict[str, Dispatcher] = {}
        self._kernels: dict[str, Kernel] = {}
        self.unusable: dict[str, str] = {}
        self._plugins: list[PluginStatus] | None = None if plugins else []
        self._lock = threading.RLock()

    @functools.cached_property
    def settings(self) -> Settings:
        """Read at the first dispatch, not at import. Raises `TokenspeedError` for what cannot be used."""
        settings = self._given if self._given is not None else read_settings()
        self.debug = settings.debug
        if settings.arch is not None:
            assume_arch(settings.arch)
        return settings

    @functools.cached_property
    def evidence(self) -> EvidenceStore:
        """What is known of kernels: of each plugin, and of the user."""
        return EvidenceStore([self.settings.cache / "evidence"])

    def add_op(self, contract: Contract) -> Dispatcher:
        """Registers an op and its reference. Raises `RegistrationError` where the name is taken."""
        with self._lock:
            if contract.name in self._dispatchers:
                raise RegistrationError(f"op {contract.name!r} is already registered")
            dispatcher = Dispatcher(contract, self)
            self._dispatchers[contract.name] = dispatcher
            declared_ops.add(contract.name)
            self.add_kernel(as_kernel(contract))
            return dispatcher

    def add_kernel(self, kernel: Kernel) -> None:
        """Registers a kernel. Raises `RegistrationError` for a name that is taken or an op that nobody declared."""
        with self._lock:
            if kernel.name in self._kernels:
                raise RegistrationError(f"kernel {kernel.name!r} is already registered")
            dispatcher = self._dispatchers.get(kernel.op)
            if dispatcher is None:
                raise RegistrationError(f"kernel {kernel.name!r}: no op {kernel.op!r}")
            self._kernels[kernel.name] = kernel
            dispatcher.add_kernel(kernel)

    @contextmanager
    def temporarily(self, kernel: Kernel) -> Iterator[None]:
        """Registers `kernel` for a block of code, for example to try one out."""
        self.add_kernel(kernel)
        try:
            yield
        finally:
            with self._lock:
                del self._kernels[kernel.name]
                self._dispatchers[kernel.op].remove_kernel(kernel)

    @property
    def contracts(self) -> Mapping[str, Contract]:
        """All ops by name."""
        return {name: dispatcher.contract for name, dispatcher in sorted(self._dispatchers.items())}

    def contract(self, op: str) -> Contract:
        """Raises `UnknownNameError` that suggests near names."""
        return self.dispatcher(op).contract

    def dispatcher(self, op: str) -> Dispatcher:
        """The state of one op's dispatch. Raises `UnknownNameError` that suggests near names."""
        if op not in self._dispatchers:
            near = difflib.get_close_matches(op, self._dispatchers, 3) or sorted(self._dispatchers)
            raise UnknownNameError(f"unknown op {op!r}; did you mean {', '.join(near)}?")
        return self._dispatchers[op]

    def kernels(self, op: str | None = None) -> list[Kernel]:
        """Kernels of an op, or all, of every plugin that imports here, usable or not."""
        self.load_plugins(unusable=True)
        return [kernel for kernel in self._kernels.values() if op in (None, kernel.op)]

    def plugins(self) -> list[PluginStatus]:
        """How each installed plugin fares here, in name order."""
        self.load_plugins(unusable=True)
        return list(self._plugins or [])

    def load_plugins(self, unusable: bool = False) -> None:
        """Loads the kernels of usable plugins, or of all, once. Called by the first dispatch."""
        with self._lock:
            if self._plugins is None:
                for name in set(self.settings.kernels) - {"*"}:
                    check_op_name(name)
                self._plugins = find_plugins(self.settings.disabled)
            for status in self._plugins:
                if status.loaded or not (status.usable or unusable):
                    continue
                if status.plugin is not None and status.plugin.evidence is not None:
                    self.evidence.add_folder(status.plugin.evidence)
                for kernel in load_kernels(status):
                    self._add_from(status, kernel)

    def record(self, record: Record) -> None:
        """Adds what was found out of a kernel to the user's evidence; later calls select by it."""
        self.evidence.record(record)
        for dispatcher in list(self._dispatchers.values()):
            dispatcher.forget()

    def explain(self, op: str, platform: Platform | None = None, signature: Signature | None = None) -> list[Candidate]:
        """Every kernel of `op`, best first, with the verdict for a call of `signature` on `platform`.

        On a platform other than the one present, whether a plugin is usable here does not count.
        """
        contract = self.contract(op)
        kernels = self.kernels(op)
        here = present_platform()
        platform = platform or here
        signature = signature or Signature()
        reasons = self_check.failures(self, contract, kernels, platform, signature)
        reasons |= self.unusable if platform.arch == here.arch else {}
        return candidates(contract, kernels, platform, signature, self.evidence, reasons)

    def _add_from(self, status: PluginStatus, kernel: Kernel) -> None:
        try:
            self.add_kernel(kernel)
        except RegistrationError as error:
            status.reason = "; ".join(filter(None, [status.reason, str(error)]))
            return
        if not status.usable:
            self.unusable[kernel.name] = f"plugin {status.name}: {status.reason}"


default_registry = Registry("tokenspeed_kernels")
