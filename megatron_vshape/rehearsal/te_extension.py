"""Import Transformer Engine's Python with replacements of its compiled module.

Transformer Engine's Python code runs unchanged; only its C++ functions are replaced. Dry runs pass
functions that compute shapes, tests pass functions that compute values.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_EXTENSION = "transformer_engine_torch"
_KINDS = ("INPUT", "WEIGHT", "OUTPUT")
_ENUMERATIONS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "FP8FwdTensors": " ".join(f"GEMM{number}_{kind}" for number in (1, 2, 3) for kind in _KINDS),
    "FP8BwdTensors": " ".join(f"GRAD_OUTPUT{number} GRAD_INPUT{number}" for number in (1, 2, 3)),
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
}
"""Enumerations whose members are looked up by value. For all others, any distinct numbers work."""

_EXPORT_ONLY = ("onnx", "onnxscript", "onnx_ir", "ml_dtypes")
"""Packages that only model export uses, but that Transformer Engine imports."""


class _Numbers(type):
    """A class whose attributes are distinct numbers, for enumerations that are not looked up."""

    __members__ = property(lambda cls: cls._asked)

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        members: Any = cls._asked
        return int(members.setdefault(name, len(members)))

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Raise NotImplementedError: a function has no replacement and is not an enumeration."""
        raise NotImplementedError(
            f"Transformer Engine calls {cls.__name__}, which rehearse does not support"
        )


class _Extension(types.ModuleType):
    """Replaces the compiled module; an unknown attribute is an enumeration or is never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        enumeration = _Numbers(name, (), {"_asked": {}})
        setattr(self, name, enumeration)
        return enumeration


class _Anything(types.ModuleType):
    """A package that is imported but not used; each of its attributes is callable."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent()


class _Absent:
    def __call__(self, *args: Any, **options: Any) -> _Absent:
        return self

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> _Absent:
        return self

    def __or__(self, operand: object) -> Any:
        return self

    __ror__ = __or__


def load(directory: Path, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Import Transformer Engine from `directory` and return its PyTorch package.

    `directory` contains a folder transformer_engine, as an unpacked wheel or a checkout does.
    `functions` are the functions of the compiled module by name. torch must report a GPU already.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not look for CUDA's libraries
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    extension: Any = _Extension(_EXTENSION)
    extension.__file__, extension.__spec__ = "none", None
    attention = Path(directory, "transformer_engine", "pytorch", "cpp_extensions", "fused_attn.py")
    attention_text = attention.read_text() if attention.is_file() else ""
    for name, members in _ENUMERATIONS.items():
        members_by_name = dict.fromkeys(members.split())
        # Before 2.18 there was one more fused attention backend.
        members_by_name |= dict.fromkeys(re.findall(rf"{name}\.(NVTE_\w+)", attention_text))
        setattr(extension, name, enum.IntEnum(name, list(members_by_name), start=0))
    for name, function in functions.items():
        setattr(extension, name, function)
    for file in Path(directory, "transformer_engine", "pytorch").rglob("*.py"):
        for name in re.findall(r"\btex\.([A-Za-z]\w*)", file.read_text()):
            getattr(extension, name)  # so that it is there for an "import *"
    sys.modules[_EXTENSION] = extension
    importlib.import_module("torch._dynamo")  # before the replacements: it checks these packages
    _stand_in_for_export()
    _bare_package(directory)
    import transformer_engine.common as common

    common.load_framework_extension = lambda name: extension
    sys.modules["transformer_engine"].common = common  # type: ignore[attr-defined]
    import transformer_engine.pytorch as te

    return te


def _stand_in_for_export() -> None:
    for name in _EXPORT_ONLY:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            package = _Anything(name)
            package.__path__ = []
            sys.modules[name] = package


def _bare_package(directory: Path) -> None:
    """Create the outer package, whose own __init__ would load the compiled library."""
    folder = Path(directory, "transformer_engine")
    package: Any = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder)]
    package.__file__ = str(folder / "__init__.py")
    package.__version__ = version = _version_in(directory)
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    package.__spec__.submodule_search_locations = [str(folder)]
    sys.modules["transformer_engine"] = package
    metadata: Any = importlib.metadata
    ask = metadata.version

    def answer(name: str) -> str:
        is_te = name.replace("_", "-") in ("transformer-engine", "transformer-engine-torch")
        return version if is_te else str(ask(name))

    metadata.version = answer  # Megatron and Transformer Engine read versions through this


def _version_in(directory: Path) -> str:
    """Return the version of the Transformer Engine in a checkout or an unpacked wheel."""
    version_file = directory / "build_tools" / "VERSION.txt"
    if version_file.is_file():
        return version_file.read_text().strip()
    for metadata_folder in directory.glob("transformer_engine-*.dist-info"):
        return metadata_folder.name.split("-")[1].removesuffix(".dist")
    raise FileNotFoundError(
        f"{directory} has no version of Transformer Engine next to its folder transformer_engine: "
        "neither build_tools/VERSION.txt, as a checkout, nor a .dist-info, as an unpacked wheel"
    )
