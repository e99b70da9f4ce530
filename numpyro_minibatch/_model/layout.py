"""The layout of a model, known before it runs: its plates, latent sites and rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from numpyro_minibatch._model.plates import PLAIN, Advised, one_row
from numpyro_minibatch.target import Slices, Target

__all__ = ["Layout", "layout_target"]


class Layout(NamedTuple):
    """The plates, latent sites and rows of a model; static and hashable.

    :param plates: the data plates and their numbers of rows.
    :param widths: the rows of one draw of each data plate.
    :param latents: the latent sites.
    :param shapes: the shapes of their unconstrained values.
    :param value_shapes: the shapes of their constrained values.
    :param automatic: whether neither the user nor the model says how many rows a draw
        has.
    :param slices: the rows among the arguments, if the model takes none by indices.
    :param by_row: deterministic sites in no plate whose values depend on the rows.
    :param subsampled: whether plates of the model have a ``subsample_size``.
    :param angles: the latent sites with a circular support.
    """

    plates: tuple[tuple[str, int], ...]
    widths: tuple[tuple[str, int], ...]
    latents: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    value_shapes: tuple[tuple[int, ...], ...] = ()
    automatic: bool = False
    slices: Slices | None = None
    by_row: tuple[str, ...] = ()
    subsampled: bool = False
    angles: tuple[str, ...] = ()


def layout_target(
    who: str,
    target: Target,
    sizes: int | Mapping[str, int] | None,
    full: bool,
    default: int | None = None,
    advised: Advised = PLAIN,
) -> Layout:
    """The layout of a target that was written by hand.

    :param who: the kernel's name, for the messages.
    :param target: the target.
    :param sizes: rows of one draw, as the user gave them.
    :param full: whether every decision reads all rows.
    :param default: rows of one draw where the user does not say.
    :param advised: what to advise where no rows of a batch are given.
    :raises ValueError: the sizes do not fit the target's plates.
    """
    plates = target.plates
    widths = dict(sizes) if isinstance(sizes, Mapping) else dict.fromkeys(plates, sizes)
    unknown = set(widths) - set(plates)
    if unknown:
        raise ValueError(
            f"{who} got batch_size for plate {min(unknown)!r}, which the target does "
            f"not have; its plates are: {', '.join(plates)}."
        )
    if full:
        widths = dict(plates)
    bound = []
    for plate, rows in sorted(plates.items()):
        if rows == 1:
            raise ValueError(one_row(who, plate))
        width = widths.get(plate)
        if width is None and default is not None:
            width = min(default, rows)
        if width is None:
            raise ValueError(
                f"{who} needs a batch_size for plate {plate!r} of the target, which "
                f"has {rows} rows: pass for example batch_size="
                f"{{{plate!r}: {advised.rows(rows, 0)}}}."
            )
        if width > rows:
            raise ValueError(
                f"{who} got batch_size={width} for plate {plate!r}, which has only "
                f"{rows} rows. Use at most {rows}, the full batch."
            )
        bound.append((plate, width))
    automatic = default is not None and sizes is None and not full
    return Layout(tuple(sorted(plates.items())), tuple(bound), (), automatic=automatic)
