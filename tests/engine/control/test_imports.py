"""The control plane stands on the standard library alone."""

import subprocess
import sys


def test_it_imports_nothing_but_the_standard_library() -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "import tokenspeed_engine.control\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(roots - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tokenspeed_engine"]
