"""Adds to the package what lies outside it: a start-up file, and the examples.

By the start-up file MEGATRON_VSHAPE reaches any program; `megatron-vshape examples` writes out the
configurations and scripts that the documents name.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

START_UP = "megatron_vshape.pth"
SCRIPTS = ("pretrain_gpt.py", "hybrid_local.py", "prepare_text.py", "slurm/*")
EXAMPLES = ("configs/*/*", *(f"scripts/{each}" for each in SCRIPTS))
"""What `examples` offers from a wheel; in a checkout it all lies where the documents say."""


class BuildWithExtras(build_py):
    """Builds the package, the file that Python reads when it starts, and the examples."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            for source, target in self._extras().items():
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what is built."""
        mine = [] if self.editable_mode else list(self._extras().values())
        return [*super().get_outputs(include_bytecode), *mine]

    def _extras(self) -> dict[str, str]:
        """Return where each file goes, by where it is."""
        examples = sorted(each for pattern in EXAMPLES for each in Path().glob(pattern))
        folder = Path(self.build_lib, "megatron_vshape", "examples")
        return {START_UP: str(Path(self.build_lib, START_UP))} | {
            str(each): str(folder / each) for each in examples if each.is_file()
        }


setup(cmdclass={"build_py": BuildWithExtras})
