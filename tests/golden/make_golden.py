"""Write the recorded values of the golden test anew: ``make_golden.py [NAME ...]``.

Only for a change that is meant to alter what is written or what an audit says.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import golden

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or golden.RECORDED:
            golden.write(name, golden.RECORDED[name](Path(folder)))
            print(golden.recorded_path(name))
