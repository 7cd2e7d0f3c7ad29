"""Texts and colors of the playground, checked without a browser."""

import re

import pytest

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.playground.html import static_files
from megatron_vshape.playground.picture import palette, size_note
from megatron_vshape.view.names import contrast

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`')
_CODE = re.compile(r"\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")


def texts_of(name: str) -> list[str]:
    """Return the strings of a static file that are texts rather than names in the program."""
    content = re.sub(r"(?m)^\s*//.*|/\*\*[^*]*\*/", "", static_files()[name][0].decode())
    strings = [_CODE.sub("", string)[1:-1] for string in _STRING.findall(content)]
    return [string for string in strings if " " in string or string[:1].isupper()]


@pytest.mark.parametrize("name", [name for name in static_files() if name.endswith(".js")])
def test_texts_say_rank_rather_than_device(name):
    texts = texts_of(name)
    assert not [text for text in texts if re.search(r"\bdevices?\b", text, re.IGNORECASE)]


def test_size_of_a_schedule_is_in_ranks():
    note = "4 ranks, 8 microbatches, 192 passes; 2 chunks per rank, V-shaped"
    assert size_note(make("v-half", 4, 8)) == note


def theme_colours(theme: str) -> dict[str, str]:
    """Return the colors of the style sheet in a theme."""
    style = static_files()["style.css"][0].decode()
    selector = ':root[data-theme="dark"] {' if theme == "dark" else ":root {"
    block = style.split(selector)[1].split("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("num_chunks", range(2, 9))
def test_chunks_differ_and_chunk_0_stands_out(theme, num_chunks):
    colours = palette(is_dark=theme == "dark")
    background = theme_colours(theme)["page"]
    for kind, fills in zip((Kind.F, Kind.B, Kind.W), colours["fills"][num_chunks - 1], strict=True):
        contrasts = [contrast(fill, background) for fill in fills]
        assert contrasts == sorted(contrasts, reverse=True), kind
        assert contrasts[0] > 1.8 * contrasts[-1], kind


def test_dark_passes_and_bubbles_are_visible():
    colours, theme = palette(is_dark=True), theme_colours("dark")
    for fills, inks in zip(colours["fills"], colours["inks"], strict=True):
        for fill, ink in zip(sum(fills, []), sum(inks, []), strict=True):
            assert contrast(fill, theme["idle"]) > 1.9
            assert contrast(fill, ink) >= 4
    assert contrast(theme["hatch-line"], theme["idle"]) > 2.5
