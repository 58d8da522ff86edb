"""The gated residual."""
