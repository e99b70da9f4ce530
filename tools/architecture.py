"""Draw the picture of the architecture.

`python tools/architecture.py > docs/_static/architecture.svg` writes it. It has a white
background, so that it can be read on a dark page, too, and needs no font to be fetched.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 1000, 704
INK, LINE, QUIET = "#1f2933", "#3e4c59", "#52606d"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# of one character, in units of the font's size: wider than those of most fonts
WIDTH_OF_CHARACTER, WIDTH_OF_MONO = 0.56, 0.62


class Box(NamedTuple):
    """A part: its name in the package, and what it does, a line at a time."""

    x: float
    y: float
    width: float
    height: float
    name: str
    lines: tuple[str, ...] = ()
    fill: str = "#e3f2fd"
    outside: bool = False  # not of this package

    @property
    def right(self) -> float:
        """The x of the right side."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of the lower side."""
        return self.y + self.height

    @property
    def middle(self) -> tuple[float, float]:
        """The point in the middle."""
        return self.x + self.width / 2, self.y + self.height / 2


def text(
    x: float,
    y: float,
    words: str,
    size: float = 13,
    anchor: str = "middle",
    **more: str,
) -> str:
    """One line of text, whose baseline is at ``y``."""
    given = {"fill": INK, "text-anchor": anchor, "font-size": f"{size:g}", **more}
    attributes = " ".join(f'{name}="{value}"' for name, value in given.items())
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{escape(words)}</text>'


def draw(box: Box) -> str:
    """A box with its text; a line that does not fit is an error."""
    dashed = ' stroke-dasharray="5 4"' if box.outside else ""
    parts = [
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" '
        f'height="{box.height:g}" rx="7" fill="{box.fill}" stroke="{LINE}"{dashed}/>'
    ]
    leading = 17
    x, y = box.middle
    y -= leading * len(box.lines) / 2 - 4.5
    for number, line in enumerate([box.name, *box.lines]):
        name = number == 0 and not box.outside
        wide = len(line) * (14 * WIDTH_OF_MONO if name else 13 * WIDTH_OF_CHARACTER)
        if wide > box.width - 8:
            raise ValueError(f"{line!r} needs {wide:.0f} of {box.width}: split it")
        if name:
            more = {"font-family": escape(MONO), "font-weight": "600"}
            parts.append(text(x, y, line, 14, **more))
        else:
            parts.append(text(x, y, line, fill=INK if number == 0 else QUIET))
        y += leading
    return "\n".join(parts)


def band(y: float, height: float, title: str, fill: str) -> str:
    """The background of a stage, with its title at the top left."""
    return (
        f'<rect x="10" y="{y:g}" width="{WIDTH - 20}" height="{height:g}" rx="10" '
        f'fill="{fill}"/>\n'
        + text(26, y + 22, title, 14, "start", **{"font-weight": "600"})
    )


def arrow(*points: tuple[float, float], both: bool = False, head: bool = True) -> str:
    """A line through points, with a head at its end, or at both."""
    where = " ".join(f"{x:g},{y:g}" for x, y in points)
    heads = ' marker-end="url(#head)"' if head else ""
    heads += ' marker-start="url(#head)"' if both else ""
    return (
        f'<polyline points="{where}" fill="none" stroke="{LINE}" '
        f'stroke-width="1.6"{heads}/>'
    )


def picture() -> str:
    """The whole file."""
    green, plain = "#e3f9e5", "#ffffff"
    # once, before the first draw
    model = Box(25, 50, 130, 66, "NumPyro model", ("and its data",), plain, True)
    latent = Box(
        185, 50, 165, 66, "marginal", ("optional: integrates", "latents of rows out")
    )
    checks = Box(380, 50, 130, 66, "_model", ("checks, and", "first positions"))
    target = Box(
        540, 50, 170, 66, "target", ("prior, and one log", "likelihood per row")
    )
    known = Box(
        785, 50, 190, 66, "control_variate", ("optional: the rows", "become residuals")
    )
    # one step
    scales = Box(190, 186, 145, 44, "preconditioner", ("coordinates",))
    pace = Box(355, 186, 145, 44, "schedule", ("step size",))
    heat = Box(805, 186, 145, 44, "ladder", ("temperatures",))
    state = Box(25, 276, 160, 76, "state of the chain", ("position z",), plain, True)
    move = Box(
        245,
        276,
        200,
        76,
        "proposal, dynamics",
        ("a new position z′, or", "gradient steps"),
    )
    ratio = Box(
        525, 276, 200, 76, "estimate", ("log ratio of z′ and z,", "and its variance")
    )
    test = Box(800, 276, 155, 76, "accept", ("probability, and one", "uniform number"))
    rows = Box(525, 404, 200, 50, "batch", ("which rows to read",))
    # afterwards
    driver = Box(
        35,
        568,
        225,
        76,
        "sampling",
        ("sample, or NumPyro's MCMC:", "warmup, chains, draws"),
    )
    groups = Box(330, 568, 170, 76, "inference_data", ("ArviZ groups",), green)
    arviz = Box(
        560, 536, 405, 36, "ArviZ: summaries, plots, comparisons", (), plain, True
    )
    advice = Box(
        560, 584, 405, 44, "diagnostics", ("numbers, and what to change",), green
    )
    more = Box(560, 640, 405, 36, "plots, evidence, cycles, ensemble", (), green)
    boxes = [model, latent, checks, target, known, scales, pace, heat, state, move]
    boxes += [ratio, test, rows, driver, groups, arviz, advice, more]

    middle, back, trunk = state.middle[1], 478.0, 530.0
    small = {"size": 12, "anchor": "start", "fill": QUIET}
    parts = [
        band(10, 122, "Set-up, once for a model and its data", "#f5f7fa"),
        band(146, 348, "One step of a kernel (package kernels)", "#f5f7fa"),
        band(508, 184, "The run", "#f5f7fa"),
        *[draw(box) for box in boxes],
        arrow((model.right, model.middle[1]), (latent.x, latent.middle[1])),
        arrow((latent.right, latent.middle[1]), (checks.x, checks.middle[1])),
        arrow((checks.right, checks.middle[1]), (target.x, target.middle[1])),
        arrow((target.right, target.middle[1]), (known.x, known.middle[1]), both=True),
        arrow((target.middle[0], target.bottom), (ratio.middle[0], ratio.y)),
        text(target.middle[0] + 10, 204, "log likelihood of the", **small),
        text(target.middle[0] + 10, 220, "rows, at z and z′", **small),
        arrow((300, scales.bottom), (300, move.y)),
        arrow((390, pace.bottom), (390, move.y)),
        arrow((heat.middle[0], heat.bottom), (test.middle[0], test.y)),
        arrow((state.right, middle), (move.x, middle)),
        arrow((move.right, middle), (ratio.x, middle)),
        arrow((ratio.right, middle), (test.x, middle)),
        arrow((590, rows.y), (590, ratio.bottom)),
        arrow((660, ratio.bottom), (660, rows.y)),
        text(580, 383, "rows", size=12, anchor="end", fill=QUIET),
        text(670, 383, "more, if too noisy", **small),
        arrow(
            (test.middle[0], test.bottom),
            (test.middle[0], back),
            (state.middle[0], back),
            (state.middle[0], state.bottom),
        ),
        text(state.middle[0] + 14, back - 8, "z′ if accepted, otherwise z", **small),
        arrow((driver.middle[0], 494), (driver.middle[0], driver.y)),
        text(driver.middle[0] + 10, 536, "draws and statistics", **small),
        arrow((driver.right, driver.middle[1]), (groups.x, groups.middle[1])),
        arrow((groups.right, groups.middle[1]), (trunk, groups.middle[1]), head=False),
        *[
            arrow((trunk, groups.middle[1]), (trunk, y), (560, y))
            for y in (arviz.middle[1], advice.middle[1], more.middle[1])
        ],
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="{escape(FONT)}">\n'
        "<title>The parts of numpyro-minibatch, and one step</title>\n"
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" '
        'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    print(picture(), end="")
