"""What can be wrong with a model folder, said so that a reader can fix it."""

from collections.abc import Iterable

LISTED = 20


class CheckpointError(Exception):
    """A model folder that cannot be served.

    `problems` holds every one found, sorted; the message lists the first 20 and counts the rest.
    """

    def __init__(self, subject: str, problems: Iterable[str]) -> None:
        self.subject = subject
        self.problems = tuple(sorted(set(problems)))
        listed = list(self.problems[:LISTED])
        if len(self.problems) > LISTED:
            listed.append(f"... and {len(self.problems) - LISTED} more")
        if len(listed) == 1:
            message = f"{subject}: {listed[0]}"
        else:
            message = "\n  ".join([f"{subject}: {len(self.problems)} problems", *listed])
        super().__init__(message)


class ConfigError(CheckpointError):
    """A config.json that is unreadable, of an unknown model type, or asks for what the engine does not compute."""
