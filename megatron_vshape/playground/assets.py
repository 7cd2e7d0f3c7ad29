"""The files that the page consists of; they come with the package."""

from importlib import resources

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the page's files by name, with their types; nothing else is ever served."""
    found = {}
    for each in resources.files("megatron_vshape.playground").joinpath("static").iterdir():
        suffix = "." + each.name.rpartition(".")[2]
        if each.is_file() and suffix in TYPES:
            found[each.name] = (each.read_bytes(), TYPES[suffix])
    return found
