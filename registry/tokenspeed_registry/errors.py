"""Every error that the registry raises on purpose. All derive from `TokenspeedError`.

An argument error also derives from the builtin that Python programmers expect (`TypeError` for a wrong dtype,
`ValueError` for the rest), so callers need not import this module to catch it.
"""

from collections.abc import Sequence


class TokenspeedError(Exception):
    """Base of all errors raised by the toolkit."""


class ArgumentError(TokenspeedError, ValueError):
    """A call that does not meet its op's contract.

    Attributes: `op`, `argument` (the parameter at fault), `expected` and `got`, all strings.
    """

    def __init__(self, op: str, argument: str, expected: str, got: str) -> None:
        super().__init__(f"{op}: argument {argument!r}: expected {expected}, got {got}")
        self.op = op
        self.argument = argument
        self.expected = expected
        self.got = got


class ArgumentTypeError(ArgumentError, TypeError):
    """The argument has the wrong Python type."""


class DtypeError(ArgumentError, TypeError):
    """The tensor has a dtype that the contract does not allow."""


class ShapeError(ArgumentError):
    """Wrong rank, or a dimension that does not match the others."""


class StrideError(ArgumentError):
    """The tensor is not laid out as the contract asks."""


class DeviceError(ArgumentError):
    """The tensor lies on another device than the call's first tensor, or must lie on the host."""


class GradError(ArgumentError):
    """The tensor requires grad: the toolkit is for inference only."""


class ContentError(ArgumentError):
    """The values of an index tensor are not valid, for example offsets that decrease."""


class NoKernelError(TokenspeedError, RuntimeError):
    """No kernel can serve the call, or the explicitly chosen one cannot. `reasons` has one line a candidate."""

    def __init__(self, message: str, reasons: Sequence[str]) -> None:
        super().__init__("\n  ".join([message, *reasons]))
        self.reasons = tuple(reasons)


class RegistrationError(TokenspeedError, ValueError):
    """A contract or kernel that cannot be registered: incomplete, or its name is taken."""


class UnknownNameError(TokenspeedError, LookupError):
    """An op, backend, kernel or arch that nobody knows. The message lists near or known names."""
