"""The embedded default model: how it is trained and exported, and where its checkpoint lies."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
