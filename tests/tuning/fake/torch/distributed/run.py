"""Starts the script once, in place of torchrun; its own flags are left out."""

import os
import sys

at = next(place for place, each in enumerate(sys.argv) if each.endswith(".py") and place)
os.execv(sys.executable, [sys.executable, *sys.argv[at:]])
