"""The colours of a report, by name, for a light and for a dark page."""

from __future__ import annotations

import colorsys

WINDOWS = range(2, 11)
"""Windows that have a colour of their own, and so a curve of theory."""
_SERIES = {
    "light": ("#1f6fb4", "#c85a08", "#1a8056", "#b5338a", "#6b56c8", "#856300", "#0a7d8c", "#c2353b"),
    "dark": ("#6cb1ef", "#f59a4a", "#56c596", "#ea83c4", "#a99bf2", "#d9b13f", "#4cc9d8", "#f2797e"),
}
_INKS = {
    "light": {"ink": "#1b1f24", "muted": "#5c6570", "grid": "#d9dee4", "paper": "#fefefe"},
    "dark": {"ink": "#e6e8eb", "muted": "#9aa4b0", "grid": "#333a43", "paper": "#14171b"},
}


def palette(theme: str) -> dict[str, str]:
    """Colours by their names, for the theme "light" or "dark"."""
    lightness = {"light": 0.40, "dark": 0.66}[theme]
    named = {f"s{i}": color for i, color in enumerate(_SERIES[theme], start=1)}
    for place, window in enumerate(WINDOWS):
        red, green, blue = colorsys.hls_to_rgb(0.72 - 0.72 * place / (len(WINDOWS) - 1), lightness, 0.75)
        named[f"k{window}"] = f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
    return named | _INKS[theme]
