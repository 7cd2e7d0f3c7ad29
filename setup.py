"""Puts a start-up file beside the package, by which MEGATRON_VSHAPE reaches any program."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

START_UP = "megatron_vshape.pth"


class BuildWithStartUpFile(build_py):
    """Builds the package, and the file that Python reads when it starts."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            Path(self.build_lib).mkdir(parents=True, exist_ok=True)
            self.copy_file(START_UP, self._start_up())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what is built."""
        mine = [] if self.editable_mode else [self._start_up()]
        return [*super().get_outputs(include_bytecode), *mine]

    def _start_up(self) -> str:
        return str(Path(self.build_lib, START_UP))


setup(cmdclass={"build_py": BuildWithStartUpFile})
