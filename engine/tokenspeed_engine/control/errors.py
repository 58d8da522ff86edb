"""What the control plane raises."""


class RequestRefusedError(ValueError):
    """A request that cannot be served as asked; the message names the field or limit."""


class StateReusedError(RuntimeError):
    """A lifecycle state was used after a transition had consumed it."""


class ExecutorLostError(RuntimeError):
    """The executor failed for good: it will run no step any more."""


class LeaseError(RuntimeError):
    """A lease was used or released after its release."""
