// Light and dark theme: the style sheet's colors, also for the pictures.

const NAMES = ["page", "ink", "quiet", "faint", "rule", "late", "idle", "held", "veil"];
const ORDER = ["auto", "light", "dark"];

/** Return the theme after this one. */
export function nextTheme(theme) {
  return ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
}

/** Set the theme; `auto` is the system's. */
export function setTheme(theme) {
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

/** Return the colors of the pictures, with the palette of the passes. */
export function themeColours(palettes) {
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const palette = palettes[document.documentElement.dataset.theme];
  return { ...colours, palette, hatchLine: style.getPropertyValue("--hatch-line").trim() };
}
