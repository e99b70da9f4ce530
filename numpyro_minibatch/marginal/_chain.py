r"""Chains of discrete states in each row, summed by the forward recursion.

A step of a ``scan`` has discrete sites in the plate of the rows, whose joint state is
``s_t``. What the step carries to the next one depends on the last ``h`` states, so that
these are a Markov chain of order ``h``. With

.. math:: \alpha_t(s_{t-h+1}, \dots, s_t) = p(y_1, \dots, y_t, s_{t-h+1}, \dots, s_t),

one step of the recursion sums over the oldest state,

.. math:: \alpha_t(s_{t-h+1}, \dots, s_t)
    = \sum_{s_{t-h}} \alpha_{t-1}(s_{t-h}, \dots, s_{t-1}) \,
      p(y_t, s_t \mid s_{t-h}, \dots, s_{t-1}),

and the sum of the last one is the likelihood of the row. All are kept as logarithms.
Before the first step the states are the first ones of their supports, with probability
one: the value that is carried into the scan does not depend on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_minibatch._internal.precision import full_precision, in_this_precision
from numpyro_minibatch._model.dataflow import inputs_used
from numpyro_minibatch.marginal._quadrature import log_sum_exp
from numpyro_minibatch.marginal._row_sites import (
    RowMarginal,
    each_key,
    marked_states,
    next_marks,
    row_marks,
    rows_first,
    site_rows,
)
from numpyro_minibatch.marginal._scans import EachScan, like_before
from numpyro_minibatch.marginal._sites import Chain, Level, run_hidden, states_of
from numpyro_minibatch.target import integrates, takes_highest

__all__ = ["ChainModel", "ChainRows", "StatesGiven", "value_at"]


class StatesGiven(Messenger):
    """Give the discrete sites of a step their values in a joint state.

    :param places: for each site its place in its support.
    :param shared: values of the sites that rows share.
    """

    def __init__(
        self, places: Mapping[str, Array], shared: Mapping[str, Array] | None = None
    ) -> None:
        self.places, self.shared = places, shared or {}
        super().__init__(None)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.places:
            msg["value"] = value_at(msg["fn"], self.places[msg["name"]])
        elif msg["type"] == "sample" and msg["name"] in self.shared:
            msg["value"] = self.shared[msg["name"]]


def value_at(fn: Any, place: Array) -> Array:
    """The value of a discrete site at a place of its support.

    :param fn: the distribution of the site.
    :param place: a number for all rows, or one for each of them.
    """
    value, shape = states_of(fn)[place], fn.batch_shape + fn.event_shape
    return value.reshape(shape) if place.ndim else jnp.broadcast_to(value, shape)


# The recursion ------------------------------------------------------------------------


class _Quiet(Messenger):
    """Hide the sites of the rows in a step, and record what the rows share.

    :param level: the chain.
    :param places: the state of each site.
    """

    def __init__(self, level: Level, places: Mapping[str, Array]) -> None:
        self.level, self.places = level, places
        self.shared: dict[str, Any] = {}
        self.observed: dict[str, Array] = {}
        self.supports: dict[str, Array] = {}
        self.sizes: dict[str, int] = {}
        self._asked: set[int] = set()
        super().__init__(None)

    def process_message(self, msg: Any) -> None:
        kind, name = msg["type"], msg.get("name")
        chain = self.level.chain
        assert chain is not None
        if kind == "sample" and name in self.places:
            fn = msg["fn"]
            msg["value"] = value_at(fn, self.places[name])
            msg["stop"] = True
            self.supports[name] = states_of(fn)
            frames = msg["cond_indep_stack"]
            self.sizes |= {f.name: f.size for f in frames}
            _check_shape(name, fn, self.level.plates, [f.size for f in frames])
        elif kind == "sample" and name in chain.observed:
            fn = msg["fn"]
            value = jnp.asarray(msg["value"])
            shape = jnp.broadcast_shapes(value.shape, fn.shape())
            value = jnp.broadcast_to(value, shape)
            plates = self.level.plates
            self.observed[name] = rows_first(value, msg, plates, fn.event_dim)
            msg["stop"] = True
        elif kind == "deterministic" and name in self.level.hidden:
            msg["stop"] = True
        elif kind == "sample" and msg["value"] is None:
            self._asked.add(id(msg))

    def postprocess_message(self, msg: Any) -> None:
        if id(msg) in self._asked:
            self._asked.discard(id(msg))
            self.shared[msg["name"]] = msg["value"]


def _check_shape(name: str, fn: Any, plates: tuple[str, ...], sizes: list[int]) -> None:
    rows = int(np.prod(sizes, dtype=int))
    if int(np.prod(fn.batch_shape, dtype=int)) != rows:
        raise ValueError(
            f"marginalize: site {name!r} has batch shape {fn.batch_shape} in "
            f"{' and '.join(map(repr, plates))} of {rows} rows. Make the other axes an "
            "event, with .to_event, or put them into a plate."
        )


class _Scanned(NamedTuple):
    """A scan that has been run, and what its recursion needs.

    :param step: the step, as the user wrote it.
    :param init: what is carried into the first step.
    :param xs: what the scan is over.
    :param length: the number of steps.
    :param reverse: whether the last step is the first one.
    :param shared: values of the sites that rows share, steps first.
    :param observed: observations, steps first and rows second.
    :param supports: the support of each discrete site.
    :param shape: the number of rows along each plate of the level.
    """

    step: Callable
    init: Any
    xs: Any
    length: int
    reverse: bool
    shared: Mapping[str, Array]
    observed: Mapping[str, Array]
    supports: Mapping[str, Array]
    shape: tuple[int, ...]


class _SumScan(EachScan):
    """Replace the sites of the rows in a scan by their marginal likelihood.

    :param model: the model, whose level is the chain.
    :param places: the state of each site in the run for what the rows share, which does
        not depend on it. By default the first one.
    :param observe: whether to observe the marginal likelihood.
    """

    def __init__(
        self,
        model: ChainModel,
        places: Mapping[str, Array] | None = None,
        observe: bool = True,
    ) -> None:
        self.model, self.observe = model, observe
        first = dict.fromkeys(model.level.names, jnp.zeros((), jnp.int32))
        self.places = first if places is None else places
        self.globals: dict[str, Any] = {}
        self.scanned: _Scanned | None = None
        self._message: Any = None
        super().__init__(model.fn)

    def process_message(self, msg: Any) -> None:
        super().process_message(msg)
        if msg["type"] == "deterministic" and msg["name"] in self.model.level.hidden:
            msg["stop"] = True

    def at_scan(self, msg: Any, index: int) -> None:
        level = self.model.level
        assert level.chain is not None
        if index != level.chain.position:
            return
        step, init, xs, length, reverse = msg["args"]
        sizes: dict[str, int] = {}

        def quiet(carry: Any, x: Any) -> Any:
            hidden = _Quiet(level, self.places)
            with hidden:
                new, y = step(carry, x)
            sizes.update(hidden.sizes)
            seen = hidden.shared, hidden.observed, hidden.supports
            return like_before(new, carry), (y, *seen)

        msg["args"] = (quiet, init, xs, length, reverse)
        self._message = msg, step, sizes

    def postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            self.globals[msg["name"]] = msg["value"]
        if self._message is None or msg is not self._message[0]:
            return
        (_, step, sizes), self._message = self._message, None
        _, init, xs, _, reverse = msg["args"]
        carried, (trace, (ys, shared, observed, supports)) = msg["value"]
        msg["value"] = carried, (trace, ys)
        level = self.model.level
        assert level.chain is not None
        self.scanned = _Scanned(
            step=step,
            init=init,
            xs=xs,
            length=level.chain.length,
            reverse=reverse,
            shared=shared,
            observed=observed,
            supports={name: x[0] for name, x in supports.items()},
            shape=tuple(sizes[plate] for plate in level.plates),
        )
        if self.observe:
            self.model.observe(self.scanned)


@dataclass(frozen=True, eq=False)
class ChainModel:
    """A model in which the discrete states of one scan are marginalized.

    :param fn: the model.
    :param level: the sites of the scan and their plates.
    """

    fn: Callable
    level: Level

    @full_precision
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and observe the marginal likelihood of each row."""
        with _SumScan(self):
            return in_this_precision(self.fn)(*args, **kwargs)

    def observer(self) -> _SumScan:
        """The model without the sites of its rows, to be run for :meth:`rows`."""
        return _SumScan(self, observe=False)

    def rows(self, seen: _SumScan, args: tuple, kwargs: Mapping[str, Any]) -> ChainRows:
        """The rows of the model after a run.

        :param seen: the :meth:`observer` that was run.
        """
        assert seen.scanned is not None
        return ChainRows(self, seen.scanned)

    def observe(self, scanned: _Scanned) -> None:
        """The marginal likelihood of the rows as a site in their plates."""
        if integrates() or takes_highest():
            alpha, _ = self.forward(scanned)
            log_marginal = log_sum_exp(alpha.reshape(-1, *scanned.shape))
        else:
            log_marginal = self.log_integrand(scanned)
        rows = len(scanned.shape)
        values = [jnp.moveaxis(x, 0, rows) for x in scanned.observed.values()]
        if len(values) > 1:
            real = jnp.result_type(float)
            flat = [jnp.asarray(x, real).reshape(*scanned.shape, -1) for x in values]
            values = [jnp.concatenate(flat, -1)]
        fn = RowMarginal(log_marginal, values[0].shape[rows:])
        with ExitStack() as stack:
            for dim, plate in enumerate(self.level.plates, -rows):
                size = scanned.shape[dim]
                stack.enter_context(numpyro.plate(plate, size, dim=dim))
            numpyro.sample("_".join(scanned.observed), fn, obs=values[0])

    @property
    def chain(self) -> Chain:
        """The scan."""
        assert self.level.chain is not None
        return self.level.chain

    @property
    def states(self) -> np.ndarray:
        """All joint states of a step, one state per line."""
        ranges = [range(site.size) for site in self.level.sites]
        return np.array(list(itertools.product(*ranges)), np.int32)

    def log_step(
        self, scanned: _Scanned, carry: Any, x: Any, shared: Any, state: Array
    ) -> tuple[Array, Any]:
        """The log density of a step for each row, and what it carries.

        :param carry: what the step before carries.
        :param x: the element of the scan.
        :param shared: values of the sites that rows share, in this step.
        :param state: the places of the sites, in the last axis; of all rows or of each.
        """
        sites = self.level.names
        places = {name: state[..., k] for k, name in enumerate(sites)}
        with handlers.block(), handlers.trace() as trace, StatesGiven(places, shared):
            new, _ = scanned.step(carry, x)
        total = jnp.zeros(scanned.shape)
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            if name in sites or name in self.chain.observed:
                total = total + site_rows(site, self.level.plates, 1.0)
        return total, like_before(new, carry)

    def log_integrand(self, scanned: _Scanned) -> Array:
        """The log density of each row at states of its own.

        They differ between rows, so that a row whose density depends on the states of
        another one has another density in another batch.
        """
        rows = len(scanned.shape)
        observed = [jnp.moveaxis(x, 0, rows) for x in scanned.observed.values()]

        def step(marks: Array, _: None) -> tuple[Array, Array]:
            return next_marks(marks), marked_states(marks, len(self.states))

        marks = row_marks(observed, scanned.shape)
        _, states = jax.lax.scan(step, marks, length=scanned.length)
        return self.log_joint(scanned, states)

    def log_joint(self, scanned: _Scanned, states: Array) -> Array:
        """The log density of observations and states of each row.

        :param scanned: the scan.
        :param states: the joint state of each step, by its number among all of them;
            shape ``(steps,) + rows``.
        """
        joint = jnp.asarray(self.states)

        def step(before: Any, x: Any) -> Any:
            carry, total = before
            element, shared, state = x
            found, carry = self.log_step(scanned, carry, element, shared, joint[state])
            return (carry, total + found), None

        carry = jax.tree.map(jnp.asarray, scanned.init)
        (_, total), _ = jax.lax.scan(
            step,
            (carry, jnp.zeros(scanned.shape)),
            (scanned.xs, scanned.shared, states),
            length=scanned.length,
            reverse=scanned.reverse,
        )
        return total

    def forward(self, scanned: _Scanned, keep: bool = False) -> tuple[Array, Any]:
        """The forward recursion.

        :param scanned: the scan.
        :param keep: whether to keep what draws of the states need.
        :return: the log probabilities of the observations and of the last states, with
            an axis for each of these, the oldest first, and then the rows; and for
            each step the same before it, and the log densities of its states given
            those before it.
        """
        order, varying, shape = self.chain.order, self.chain.varying, scanned.shape
        count, joint = len(self.states), jnp.asarray(self.states)
        rows = len(shape)
        leaves, tree = jax.tree.flatten(scanned.init)
        leaves = [jnp.asarray(x) for x in leaves]

        def one(leaves: list[Array], x: Any, shared: Any, state: Array) -> Any:
            carry = jax.tree.unflatten(tree, leaves)
            total, new = self.log_step(scanned, carry, x, shared, joint[state])
            return total, jax.tree.leaves(new)

        each: Callable = jax.vmap(one, in_axes=(None, None, None, 0))
        for _ in range(order):
            axes = [0 if yes else None for yes in varying]
            each = jax.vmap(each, in_axes=(axes, None, None, None))

        def step(before: Any, x: Any) -> Any:
            alpha, leaves = before
            log_p, new = each(leaves, *x, jnp.arange(count))
            after = jnp.expand_dims(alpha, order) + log_p
            # the sum over the oldest state, on which nothing that is carried depends
            new = [
                leaf[0] if yes else leaf[(0,) * (order + 1)]
                for leaf, yes in zip(new, varying, strict=True)
            ]
            return (log_sum_exp(after), new), (alpha, log_p) if keep else None

        known = np.full((count,) * order, -np.inf)
        known[(0,) * order] = 0.0
        start = jnp.broadcast_to(
            jnp.asarray(known, jnp.result_type(float)).reshape(
                *known.shape, *(1,) * rows
            ),
            known.shape + shape,
        )
        first = [
            jnp.broadcast_to(leaf, known.shape + leaf.shape) if yes else leaf
            for leaf, yes in zip(leaves, varying, strict=True)
        ]
        (alpha, _), kept = jax.lax.scan(
            step,
            (start, first),
            (scanned.xs, scanned.shared),
            length=scanned.length,
            reverse=scanned.reverse,
        )
        return alpha, kept

    def checked(self, args: tuple, kwargs: Mapping[str, Any]) -> Level:
        """The level with the deterministic sites that depend on the states.

        :raises ValueError: something outside of the row depends on a state.
        """
        names = self.level.names
        outputs: list[tuple[str, bool]] = []

        def run(places: dict[str, Array]) -> list[Any]:
            outputs.clear()
            summed = _SumScan(self, places, observe=False)
            found = []
            for name, site in run_hidden(summed, args, kwargs).items():
                if site["type"] == "sample":
                    outputs.append((name, False))
                    found.append(site["fn"].log_prob(site["value"]))
                elif site["type"] == "deterministic":
                    outputs.append((name, True))
                    found.append(site["value"])
            return found

        closed = jax.make_jaxpr(run)(dict.fromkeys(names, jnp.zeros((), jnp.int32)))
        hidden = []
        for k, (name, deterministic) in enumerate(outputs):
            one = closed.jaxpr.replace(outvars=closed.jaxpr.outvars[k : k + 1])
            used = inputs_used(closed.replace(jaxpr=one))
            which = [n for n, yes in zip(sorted(names), used, strict=True) if yes]
            if which and deterministic:
                hidden.append(name)
            elif which:
                raise ValueError(
                    f"marginalize cannot sum over {', '.join(map(repr, which))} in "
                    f"each row of plate {self.level.plates[-1]!r}: site {name!r} "
                    "depends on it and is not an observation of that row in the same "
                    "scan. Move everything that depends on the states into the scan."
                )
        return self.level._replace(hidden=tuple(hidden))


# Draws of the states ------------------------------------------------------------------


class ChainRows(NamedTuple):
    """The states of the rows of a scan at one position.

    :param model: the model.
    :param scanned: the scan.
    """

    model: ChainModel
    scanned: _Scanned

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows along each plate."""
        return self.scanned.shape

    def blank(self) -> dict[str, Array]:
        """Zeros for :meth:`log_joint_of`."""
        shape = (self.scanned.length, *self.shape)
        return {name: jnp.zeros(shape, jnp.int32) for name in self.model.level.names}

    def log_joint_of(self, values: Mapping[str, Array]) -> Array:
        """The log density of observations and states of each row.

        :param values: by site, numbers of the states, shape ``(steps,) + rows``.
        """
        joint = jnp.zeros((self.scanned.length, *self.shape), jnp.int32)
        for site in self.model.level.sites:
            joint = joint * site.size + values[site.name]
        return self.model.log_joint(self.scanned, joint)

    def draw(self, keys: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Draw the states of all steps from the last one to the first.

        :param keys: a PRNG key for each row, of the shape of the rows.
        :return: values of the sites, rows first and steps second; and for each site
            the probabilities of its states given all observations, with the states
            last.
        """
        model, order = self.model, self.model.chain.order
        count = len(model.states)
        alpha, (befores, log_ps) = model.forward(self.scanned, keep=True)
        length, rows = self.scanned.length, len(self.shape)

        def pick(number: Array, log_p: Array) -> Array:
            """One of the first axis of ``log_p`` for each row."""

            def noise(key: Array) -> Array:
                return jax.random.gumbel(
                    jax.random.fold_in(key, number), log_p.shape[:1]
                )

            return jnp.argmax(log_p + jnp.moveaxis(each_key(keys, noise), -1, 0), 0)

        def at(x: Array, states: list[Array]) -> Array:
            """Entries of ``x``, of shape ``(K,) * n + rows``, at states of each row."""
            for state in states:
                index = jnp.broadcast_to(state, (1, *x.shape[1:]))
                x = jnp.take_along_axis(x, index, 0)[0]
            return x

        # all of the last states at once
        flat = alpha.reshape(-1, *self.shape)
        joint = pick(jnp.asarray(length), flat)
        last = list(jnp.unravel_index(joint, (count,) * order))

        def back(after: Any, x: Any) -> Any:
            states, beta = after
            number, before, log_p = x
            whole = jnp.expand_dims(before, order) + log_p
            total = jax.nn.log_softmax(
                (whole + beta).reshape(-1, *self.shape), axis=0
            ).reshape(whole.shape)
            chance = jnp.exp(total).sum(tuple(range(order)))  # of the state of the step
            oldest = pick(number, _trailing(whole, states, at))
            new = [oldest, *states[:-1]]
            beta = log_sum_exp(jnp.moveaxis(log_p + beta, order, 0))
            return (new, beta[None]), (states[-1], chance)

        beta = jnp.zeros((1,) + (count,) * order + self.shape)
        _, (drawn, chances) = jax.lax.scan(
            back,
            (last, beta),
            (jnp.arange(length), befores, log_ps),
            reverse=not self.scanned.reverse,
        )
        drawn = jnp.moveaxis(drawn, 0, rows)  # rows + (steps,)
        chances = jnp.moveaxis(chances, (0, 1), (rows, rows + 1))
        values, probabilities = {}, {}
        places = model.states
        for k, site in enumerate(model.level.sites):
            support = self.scanned.supports[site.name]
            values[site.name] = support[jnp.asarray(places[:, k])[drawn]]
            of_site = jax.nn.one_hot(places[:, k], site.size)
            probabilities[site.name] = jnp.einsum("...s,sk->...k", chances, of_site)
        return values, probabilities


def _trailing(whole: Array, states: list[Array], at: Callable) -> Array:
    """``whole`` with all axes of states but the first one at the given states."""
    first = jnp.moveaxis(whole, 0, len(states))  # (K,) * order + (K,) + rows
    return at(first, states)
