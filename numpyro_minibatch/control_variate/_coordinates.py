"""The choice of the coordinates in which rows are expanded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_minibatch._model.dataflow import inputs_used
from numpyro_minibatch.control_variate._computed import Computed
from numpyro_minibatch.control_variate._expand import Coordinates
from numpyro_minibatch.control_variate._problem import Refused
from numpyro_minibatch.control_variate._taylor import Taylor
from numpyro_minibatch.target import ModelTarget, Target

__all__ = ["choose_coordinates"]


def choose_coordinates(
    target: Target, example: Any, taylor: Taylor, follows: bool = True
) -> Coordinates:
    """Choose the coordinates of the expansion.

    :param target: the target.
    :param example: a position.
    :param taylor: the control variate; the user may have chosen its sites.
    :param follows: whether moves follow the surrogate. Others need the scales of a
        posterior that is nearly normal, which an expansion in values that the model
        computes does not ensure.
    :raises Refused: the sites do not determine the likelihood of a row.
    """
    sites = taylor.sites
    if not isinstance(target, ModelTarget):
        if sites is not None:
            raise Refused(
                f"control_variate.taylor2(sites={sites!r}) chooses sites of a "
                "model; a target written by hand is expanded in its own position."
            )
        return Coordinates()
    rows = {name: jax.device_put(np.zeros(1, np.int32)) for name in target.sizes}
    shapes = jax.eval_shape(target.deterministic, example)
    values = {n: v for n, v in shapes.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def used(names: tuple[str, ...]) -> tuple[set[str], set[str]]:
        """The latent sites and the named deterministic sites that rows depend on."""
        given = {name: values[name] for name in names}

        def fn(z: Any, given: Any) -> Any:
            return target.rows(z, rows, given)

        depends = inputs_used(jax.make_jaxpr(fn)(example, given))
        flags = jax.tree.unflatten(jax.tree.structure((example, given)), depends)
        return tuple({n for n, yes in part.items() if yes} for part in flags)  # type: ignore[return-value]

    every = set(example)
    if sites is not None:
        unknown = set(sites) - every - set(values)
        if unknown:
            raise Refused(
                f"control_variate sites {sorted(unknown)} are neither latent "
                f"sites ({', '.join(sorted(every))}) nor deterministic sites outside "
                f"of the data plate ({', '.join(sorted(values)) or 'none'})."
            )
        named = tuple(sorted(set(sites) & set(values)))
        missing = used(named)[0] - set(sites)
        if missing:
            raise Refused(
                f"the likelihood of a row also depends on {sorted(missing)}, "
                f"which are not among control_variate sites {sorted(sites)}. Add them."
            )
        return Coordinates(tuple(sorted(set(sites) & every)), named)

    def size(latents: set[str], deterministic: set[str]) -> int:
        count = sum(int(np.prod(jnp.shape(example[n]))) for n in latents)
        return count + sum(int(np.prod(values[n].shape)) for n in deterministic)

    plain = used(())[0]
    if values:
        latents, deterministic = used(tuple(values))
        # the deterministic sites have fewer elements and determine the likelihood
        if size(latents, deterministic) < size(plain, set()):
            return Coordinates(tuple(sorted(latents)), tuple(sorted(deterministic)))
    # an effect is computed from at least two sites, its scale among them
    if follows and len(plain) > 1 and taylor.center is None and taylor.modes == 1:
        unnamed = _computed(target, example, size(plain, set()))
        if unnamed is not None:
            return unnamed
    return Coordinates() if plain == every else Coordinates(tuple(sorted(plain)))


def _computed(target: ModelTarget, example: Any, size: int) -> Coordinates | None:
    """The values that the model computes from its parameters, if they are fewer.

    :param size: the number of elements of the latent sites that rows depend on.
    """
    found = []
    for number in (1, 2):  # those of a batch are the same values
        rows = {
            name: jax.device_put(np.zeros(number, np.int32)) for name in target.sizes
        }
        computed = Computed.of(target, example, rows)
        if computed.size >= size:
            return None
        shapes = [v.aval.shape for v in computed.variables]
        found.append((computed.names, shapes))
    if found[0] != found[1]:
        return None
    latents = [name for name in computed.names if name in example]
    values = [name for name in computed.names if name not in example]
    return Coordinates(tuple(sorted(latents)), tuple(sorted(values)), computed=True)
