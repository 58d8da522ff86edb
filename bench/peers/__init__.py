"""Adapters of other projects' kernels for `tokenspeed-kernels bench --peers`; see README.md."""
