"""Portable kernels run in Triton's interpreter here: the choice must stand before anything imports Triton.

Device tests (`-m gpu`) are run with TRITON_INTERPRET=0.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
