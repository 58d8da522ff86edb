"""Vendor-neutral core: contracts, kernels, selection, plugins, evidence, conformance. No kernel and no op in it."""

from tokenspeed_registry.constraints import Alignment, Contiguous, Dim, Dtype, Flag, Given, OnHost
from tokenspeed_registry.content import Indices, Lengths, Offsets
from tokenspeed_registry.contract import CONTRACT_VERSION, Contract, Op
from tokenspeed_registry.cost import Cost
from tokenspeed_registry.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContentError,
    DeviceError,
    DtypeError,
    GradError,
    NoKernelError,
    RegistrationError,
    ShapeError,
    StrideError,
    TokenspeedError,
    UnknownNameError,
)
from tokenspeed_registry.kernel import ANYWHERE, Kernel, Priority, Requirement, arch, feature, kernel, vendor
from tokenspeed_registry.ops import op
from tokenspeed_registry.platform import Platform, known_platform, platform_of, present_platform
from tokenspeed_registry.plugins import Plugin
from tokenspeed_registry.reference import copy_into
from tokenspeed_registry.registry import Registry, default_registry
from tokenspeed_registry.scope import Call, dry_run, override_platform, trace, use
from tokenspeed_registry.signature import Signature
from tokenspeed_registry.tolerance import rounded_sum, unit_roundoff

__all__ = [
    "ANYWHERE",
    "CONTRACT_VERSION",
    "Alignment",
    "ArgumentError",
    "ArgumentTypeError",
    "Call",
    "ContentError",
    "Contiguous",
    "Contract",
    "Cost",
    "DeviceError",
    "Dim",
    "Dtype",
    "DtypeError",
    "Flag",
    "Given",
    "GradError",
    "Indices",
    "Kernel",
    "Lengths",
    "NoKernelError",
    "Offsets",
    "OnHost",
    "Op",
    "Platform",
    "Plugin",
    "Priority",
    "RegistrationError",
    "Registry",
    "Requirement",
    "ShapeError",
    "Signature",
    "StrideError",
    "TokenspeedError",
    "UnknownNameError",
    "arch",
    "copy_into",
    "default_registry",
    "dry_run",
    "feature",
    "kernel",
    "known_platform",
    "op",
    "override_platform",
    "platform_of",
    "present_platform",
    "rounded_sum",
    "trace",
    "unit_roundoff",
    "use",
    "vendor",
]
