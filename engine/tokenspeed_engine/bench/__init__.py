"""Benchmarks of a whole engine."""
