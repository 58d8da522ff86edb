"""Inputs for every op, one module a family; imported by tests, conformance and benches only."""

import torch

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
"""Values of a dtype axis; the first is the default."""
FP8 = torch.float8_e4m3fn
