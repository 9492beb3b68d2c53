"""The command on a rank that a real launcher starts, with faults put in on its first attempt.

torchrun … faulty.py RANK FAULTS ARGUMENTS…
"""

import os
import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from injection import from_json, inject

if __name__ == "__main__":
    _, rank, faults, *arguments = sys.argv
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (rank, "0"):
        inject(from_json(faults))
    sys.argv = ["precompute", *arguments]
    runpy.run_module("dspark.precompute", run_name="__main__", alter_sys=True)
