"""Other projects' kernels on the data of our calls. `bench/peers/README.md` says how an adapter is written.

An adapter that is absent, or fails, is named with its reason and harms no row.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from tokenspeed_registry import Contract, Signature
from tokenspeed_registry.cases import CPU, CaseSet
from tokenspeed_registry.conformance import error_of

FACTOR = 8.0
"""Of our tolerance: a peer may round where it likes, but must compute the same thing."""
FOLDER = Path(__file__).parents[2] / "bench" / "peers"
"""In a checkout."""


@dataclass(frozen=True)
class PeerCall:
    """A peer's call on given data, in its own conventions, prepared outside the timed region.

    `run` takes nothing, does the work on the current stream and may return anything. `outputs(returned)` gives what it
    computed, by the names of our outputs and mutated tensors, in our layout; None: it cannot be compared. `restore`
    undoes what a run did to tensors of the peer's own, in place; those of our call are restored anyway.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], Mapping[str, Tensor]] | None = None
    restore: Callable[[], None] | None = None


Adapter = Callable[[Mapping[str, Any]], PeerCall | None]
"""From the arguments of our op, by name, on the device; None for a call that the peer cannot do."""


@dataclass(frozen=True)
class Peer:
    """`reason`: why it is not here; empty where it is."""

    name: str
    reason: str = ""
    version: str = ""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)


def find_peers(folder: Path) -> list[Peer]:
    """The peers of the adapters in `folder`, in name order."""
    return [_load(path) for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]


def adapters_of(peers: Iterable[Peer], op: str) -> Iterator[tuple[str, Adapter]]:
    """Name and adapter of those that can do the op."""
    for peer in peers:
        if op in peer.adapters:
            yield peer.name, peer.adapters[op]


def compare(
    contract: Contract,
    source: CaseSet,
    signature: Signature,
    arguments: Mapping[str, Any],
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
) -> tuple[str | None, str | None]:
    """What is wrong with what a peer computed, and what a reader must know of it.

    `wanted`: outputs and mutated tensors of the oracle.
    """
    outputs = [output.name for output in contract.outputs]
    if not got or (source.compare is not None and not set(outputs) <= got.keys()):
        return None, "not compared"
    if misshapen := next((name for name in got if got[name].shape != wanted[name].shape), None):
        return f"{misshapen} has shape {tuple(got[misshapen].shape)}", None
    if source.compare is not None:
        on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        mine, theirs = (tuple(side[name].to(CPU) for name in outputs) for side in (got, wanted))
        errors = {outputs[0]: source.compare(on_host, mine, theirs)}
    else:
        errors = {name: error_of(tensor, wanted[name]) for name, tensor in got.items()}
    worst = max(errors, key=lambda name: errors[name] / max(contract.tolerance(signature, name), 1e-300))
    allowed = contract.tolerance(signature, worst)
    if not errors[worst] <= FACTOR * allowed:
        return f"wrong {worst}: error {errors[worst]:.3g} above {FACTOR * allowed:.3g}", None
    notes = [f"{worst} beyond our tolerance: {errors[worst]:.3g} above {allowed:.3g}"] * (errors[worst] > 2 * allowed)
    notes += [f"{name} not compared" for name in wanted if name not in got]
    return None, "; ".join(notes) or None


def _load(path: Path) -> Peer:
    name = path.stem
    try:
        module = _module(path)
        name = str(module.NAME)
        reason = module.available()
        version = getattr(module, "version", str)
        return Peer(name, reason) if reason else Peer(name, "", version(), module.adapters())
    except Exception as error:  # a peer may fail in any way
        return Peer(name, f"its adapter failed: {type(error).__name__}: {error}")


def _module(path: Path) -> ModuleType:
    """Imported as a member of a package of their own: what adapters share, they import from there."""
    package = ModuleType("tokenspeed_peers")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
