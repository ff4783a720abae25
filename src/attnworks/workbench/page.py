"""What the workbench's HTML pages share: one file that needs nothing else, templates, numbers, plots as inline SVG.

jinja2 and matplotlib are imported here alone (``pip install attnworks[report]``). Plots are drawn in the page's own
colours, so that they follow its light or dark theme, and print.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.axes import Axes

# Colours that matplotlib writes and the page replaces by its own.
TEXT, FAINT, OURS, BEST, WARN, BAD = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
OTHERS = ("#070707", "#080808")
_COLOURS = {
    TEXT: "var(--text)",
    FAINT: "var(--line)",
    OURS: "var(--accent)",
    BEST: "var(--good)",
    WARN: "var(--warn)",
    BAD: "var(--bad)",
    OTHERS[0]: "var(--violet)",
    OTHERS[1]: "var(--teal)",
}
SERIES = (OURS, WARN, BEST, BAD, *OTHERS)
"""Of lines that are told apart by their colour."""


@cache
def engine() -> Environment:
    """Raises ``ModuleNotFoundError`` that names the extra to install, without jinja2 or matplotlib."""
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the report needs {error.name}: pip install 'attnworks[report]'", name=error.name
        ) from error
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("attnworks.workbench"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters.update(number=number, percent=percent, seconds=_seconds)
    return made


def render(template: str, **values: Any) -> str:
    """A template of this package, filled in."""
    return engine().get_template(template).render(**values)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """A number in three figures, as people write it."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 999.5:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def percent(share: float) -> str:
    """A share in percent, what is far beyond 1 as a multiple."""
    if 10 < share < math.inf:
        return f"{number(share)} times"
    return "∞" if math.isinf(share) else f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.1f} min"


# ---- plots -----------------------------------------------------------------------------------------------------------


def plain(axes: Axes, grid: str = "both") -> None:
    """No frame, no ticks, a faint grid."""
    axes.grid(axis=grid, color=FAINT, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT, which="both", length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def figure(name: str, draw: Callable[[Axes], None], height: float, width: float = 8.5) -> str:
    """An inline SVG in the page's colours, with ids that begin with ``name``; inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "attnworks", "font.size": 10}):
        made = Figure(figsize=(width, height), layout="constrained")
        draw(made.subplots())
        stream = io.StringIO()
        made.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Figures of one page share its ids.
    for before in (' id="', 'href="#', "url(#"):
        svg = svg.replace(before, f"{before}{name}-")
    svg = re.sub(r'font: ([^;"]*)\'[^;"]*(?=[;"])', r"font: \1sans-serif", svg)
    for written, variable in _COLOURS.items():
        svg = svg.replace(written, variable)
    return svg
