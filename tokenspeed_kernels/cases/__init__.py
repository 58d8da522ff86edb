"""Inputs for every op, one module a family; imported by tests, conformance and benches only."""
