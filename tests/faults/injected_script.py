"""Arms faults in this rank, then runs the training script: injected_script.py FAULTS.json FLAGS"""

import json
import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"

if __name__ == "__main__":
    faults = json.loads(Path(sys.argv.pop(1)).read_text())
    sys.argv[0] = str(SCRIPT)
    source = compile(SCRIPT.read_text(), str(SCRIPT), "exec")
    # Under another name the script imports and defines, and does not start.
    exec(source, {"__name__": "imported", "__file__": str(SCRIPT)})
    injection = runpy.run_path(str(Path(__file__).with_name("injection.py")))
    injection["start"](int(os.environ["RANK"]), faults)
    exec(source, {"__name__": "__main__", "__file__": str(SCRIPT)})
