"""Tensor and expert parallelism: ranks that hold a part of the model each, and run the same steps."""
