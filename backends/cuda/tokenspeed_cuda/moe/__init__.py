"""Experts at decode."""
