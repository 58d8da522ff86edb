"""Experts with many tokens each."""
