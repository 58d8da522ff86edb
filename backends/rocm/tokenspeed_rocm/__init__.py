"""AMD backend: kernels for MI355X (gfx950). It has no kernels yet; portable ones serve this arch."""

import torch

from tokenspeed_registry import Plugin, present_platform


def probe() -> str | None:
    """Why the backend is not usable here; None where an AMD device of a known arch is present."""
    if not torch.cuda.is_available() or torch.version.hip is None:
        return "no AMD device that torch can use"
    platform = present_platform()
    return (
        None
        if platform.features
        else f"device {platform.device} has an arch this backend does not know: {platform.arch}"
    )


plugin = Plugin("rocm", modules=(), probe=probe)
