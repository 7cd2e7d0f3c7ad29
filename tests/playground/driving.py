"""Control the playground in a browser and read its content."""

from typing import Any

LEFT, RIGHT, TOP, ROW = 34, 46, 24, 26
"""Margins and row height of a picture of few devices, in CSS pixels."""

PATIENCE_MS = 300_000.0
"""Timeout of an answer on a busy machine with two cores."""

_CONTRAST = """() => {
  const levels = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (text) => {
    const [r, g, b] = levels(text).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    const apart = node.closest("option, noscript, .skip, .unseen");
    if (!own || !node.offsetParent || apart) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${node.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""Find texts with less contrast than WCAG 2 requires."""


def load(page: Any, server: str, state: str = "") -> None:
    page.goto("about:blank")
    page.goto(f"{server}#{state}")
    settled(page)


def settled(page: Any) -> None:
    """Wait until the requested result is shown."""
    page.wait_for_selector('#stage[aria-busy="false"]', timeout=PATIENCE_MS)
    page.wait_for_selector("#status", state="hidden", timeout=PATIENCE_MS)
    page.wait_for_timeout(60)


def fill(page: Any, field: str, value: str) -> None:
    page.fill(f"#in-{field}", value)
    page.press(f"#in-{field}", "Tab")
    page.wait_for_timeout(150)


def numbers(page: Any) -> dict[str, str]:
    cards = page.query_selector_all("#numbers div")
    return {
        card.query_selector("dt").inner_text(): card.query_selector("dd")
        .inner_text()
        .split("\n")[0]
        for card in cards
    }


def url(page: Any) -> str:
    """Return the address once it no longer changes; it is updated with a delay."""
    while True:
        hash_before = page.evaluate("location.hash")
        page.wait_for_timeout(350)
        if page.evaluate("location.hash") == hash_before:
            return hash_before


def wait_for_url(page: Any, part: str, is_present: bool = True) -> None:
    """Wait until the address contains the part, or no longer contains it."""
    test = "([part, there]) => location.hash.includes(part) === there"
    page.wait_for_function(test, arg=[part, is_present], timeout=PATIENCE_MS)


def wait_for_other_url(page: Any, old_hash: str) -> None:
    test = "(before) => location.hash !== before"
    page.wait_for_function(test, arg=old_hash, timeout=PATIENCE_MS)


def unreadable_texts(page: Any) -> list[str]:
    """Return the beginnings of texts with little contrast to their background."""
    texts: list[str] = page.evaluate(_CONTRAST)
    return texts


def picture(page: Any) -> str:
    return page.evaluate("document.querySelector('canvas.track').toDataURL()")


def canvas(page: Any, index: int = 0) -> dict[str, float]:
    return page.query_selector_all("canvas.track")[index].bounding_box()


def pixels(page: Any, points: list[tuple[float, float]]) -> list[str]:
    """Return the colours at places of the first picture."""
    return page.evaluate(
        """(points) => {
          const canvas = document.querySelector("canvas.track");
          const pen = canvas.getContext("2d");
          const ratio = canvas.width / canvas.clientWidth;
          const hex = (level) => level.toString(16).padStart(2, "0");
          return points.map(([x, y]) => {
            const place = [Math.round(x * ratio), Math.round(y * ratio)];
            const [r, g, b] = pen.getImageData(...place, 1, 1).data;
            return "#" + hex(r) + hex(g) + hex(b);
          });
        }""",
        points,
    )
