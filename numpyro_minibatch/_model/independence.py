"""Row independence: a row's log likelihood must not depend on the rest of its batch.

Minibatches estimate a sum over rows. They are right only if each term of the sum is a
function of the parameters and of its own row, and if everything else is the same for
every batch. A model can violate this without any error: with a lag inside the batch,
with standardised batches, or with an event dimension over the rows. The functions here
try to find a proof in the model's jaxpr. If there is none, they evaluate the same rows
in several batches and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from numpyro_minibatch._internal.precision import is_double
from numpyro_minibatch._internal.static import Static, surroundings
from numpyro_minibatch._internal.threads import untraced
from numpyro_minibatch._model.batch_comparison import (
    Comparison,
    draw_batches,
    draw_positions,
    unusual_rows,
)
from numpyro_minibatch._model.content import known_content
from numpyro_minibatch._model.dependence_errors import message_of
from numpyro_minibatch._model.layout import Layout
from numpyro_minibatch._model.values import (
    first_line,
    function_of,
    line_of,
    lines_with_numpy,
)
from numpyro_minibatch.target import Target

__all__ = ["check_rows", "known_by"]

# models whose rows were compared before, with what was known of them; it holds no data
_CHECKED: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
_MOST_CHECKED = 64  # of each model


def check_rows(
    who: str,
    make_target: Callable[[tuple, dict[str, Any]], Target],
    model: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    layout: Layout,
    init: Any = None,
) -> None:
    """Raise unless rows are independent of their batch, and all else is, too.

    Most models are proven to be right by how they compute, without any arithmetic. For
    the others, at three positions, the rows of random batches of two sizes are compared
    with the same rows in other batches. One small program compiles, in double precision
    if the model can be computed in it, so that no rounding error is taken for a
    difference. Data that are being traced have no values, and are not compared.

    :param who: the kernel's name, for the messages.
    :param make_target: from a model's arguments to its target.
    :param model: what the verdict is remembered for, with arguments of these shapes:
        the model, or a target written by hand.
    :param args: positional arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param layout: what is known of the model.
    :param init: a position, used as one of the three if given.
    :raises ValueError: a row depends on its batch, or something else does. The message
        names the site, what differs, and what to write.
    """
    static, arrays = Static.split(args, kwargs)
    if not any(size > 2 for _, size in layout.plates):
        return  # a batch of two rows is all of them
    key = known_by(model, static, arrays, layout.plates, layout.slices)
    try:
        checked = _CHECKED.setdefault(model, set())
    except TypeError:  # it cannot be referred to weakly
        checked = set()
    if key in checked:
        return
    rng = np.random.default_rng(0)
    comparison = Comparison(
        lambda arrays: make_target(*static.join(arrays)),
        arrays,
        draw_batches(dict(layout.plates), rng),
        draw_positions(layout, init, rng),
    )
    if not comparison.is_proven():
        leaves = [*arrays, *jax.tree.leaves(init)]
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        plates, data = dict(layout.plates), comparison.data()
        unusual = untraced(partial(unusual_rows, data, plates, rng))
        comparison.batches = draw_batches(plates, rng, unusual)
        try:
            found = untraced(comparison.difference)
        except (TypeError, ValueError) as error:
            # JAX does not compile np.argsort(x); an odd number of rows has no pairs
            if isinstance(error, ValueError) and "shape" not in str(error):
                raise  # of the model itself, or of this package
            line, called = line_of(model, error)
            where = f" in {line}" if line else ""
            said = f" ({type(error).__name__}: {first_line(error)})"
            if "incompatible function arguments" in said:
                # bindings to C++ print their signatures, and know no line
                calls = [] if line else lines_with_numpy(model)
                said = f" (NumPy is called in {'; '.join(calls[:3])})" if calls else ""
            what = (
                f"{called} before the model, from all rows,"
                if called
                else "what needs all rows or several of them, such as ranks or sums of "
                "pairs, before the model"
            )
            raise ValueError(
                f"{who}: the model cannot be compiled for a subset of its rows{where}"
                f"{said}. Compute {what} and pass it as an argument with one entry for "
                "each row. What needs one row alone is written with JAX's functions: "
                "jnp.exp, not np.exp."
            ) from error
        if found is not None:
            message = untraced(partial(message_of, who, comparison, found))
            raise ValueError(message)
    if len(checked) >= _MOST_CHECKED:
        checked.clear()
    checked.add(key)


def known_by(
    model: Any, static: Static, arrays: list[Any], plates: Hashable, slices: Hashable
) -> Any:
    """The key of what is known of a model: its code and the shapes of its arguments."""
    shapes = tuple((x.shape, str(x.dtype)) for x in arrays)
    content: Hashable = known_content()
    function = function_of(model)
    if content is None and isinstance(function, FunctionType):
        # flags and numbers that the model reads from its surroundings
        content = tuple((name, id(value)) for name, value in surroundings(function))
    return static, shapes, plates, slices, content, is_double()
