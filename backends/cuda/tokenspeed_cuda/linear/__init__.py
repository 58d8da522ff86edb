"""Projections of few rows."""
