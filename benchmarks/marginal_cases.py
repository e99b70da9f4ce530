"""The gallery's examples of `marginalize` at sizes that NUTS can do, and by hand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform, init_to_value

from numpyro_minibatch import by_group

ROOT = Path(__file__).resolve().parents[1]
SOME = np.arange(100)  # rows whose latent variables are compared
Draws = Mapping[str, np.ndarray]  # by name: chains, draws, shape of one

__all__ = ["CASES", "SOME", "Case", "Draws"]


def grid(points: int, half: float = 7.0) -> tuple[np.ndarray, np.ndarray]:
    """Points and log weights of the trapezoidal rule under a standard normal."""
    x = np.linspace(-half, half, points)
    log_w = -0.5 * x**2 - 0.5 * np.log(2 * np.pi) + np.log(x[1] - x[0])
    return x, log_w


class Case(NamedTuple):
    """An example at the size of its reference.

    :param model: the model of the example.
    :param whole: the model that NUTS samples, with continuous latent variables.
    :param by_hand: the model without latent variables, written by hand.
    :param args: the data.
    :param latent: from draws of NUTS to those of a latent variable of the rows, or to
        the probabilities of a state, by the name of ``recover_marginals``.
    :param about: what the line of the table says of model and size.
    :param settings: of ``MinibatchMH``.
    """

    model: Callable
    whole: Callable
    by_hand: Callable
    args: tuple
    latent: Callable[[Draws], Draws]
    about: str
    kwargs: Mapping[str, Any] = {}
    start: Callable = init_to_uniform
    names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}


def example(name: str) -> dict[str, Any]:
    """The functions of an example, without running it."""
    path = ROOT / "examples" / f"{name}.py"
    kinds = ast.Import, ast.ImportFrom, ast.FunctionDef
    body = [x for x in ast.parse(path.read_text()).body if isinstance(x, kinds)]
    found: dict[str, Any] = {}
    exec(compile(ast.Module(body, []), path, "exec"), found)
    return found


def item_response() -> Case:
    """Two-parameter item response, with the abilities in the position of NUTS."""
    there = example("item_response")
    y = jnp.asarray(there["simulate"](600, 12)[0])
    x, log_w = grid(36)

    def by_hand(y: Any) -> None:
        prior = dist.Normal(0, 2).expand([12]).to_event(1)
        difficulty = numpyro.sample("difficulty", prior)
        prior = dist.LogNormal(0, 0.5).expand([12]).to_event(1)
        discrimination = numpyro.sample("discrimination", prior)
        logits = discrimination[:, None] * (x - difficulty[:, None])
        rows = y @ logits - jax.nn.softplus(logits).sum(0)
        numpyro.factor("y", jax.nn.logsumexp(rows + log_w, -1).sum())

    return Case(
        there["model"],
        there["model"],
        by_hand,
        (y,),
        lambda found: {"ability": found["ability"][..., SOME]},
        "two-parameter item response, 600 persons, 12 items",
        names=("difficulty", "discrimination"),
    )


def annotators() -> Case:
    """Dawid and Skene's model, with the classes summed by hand."""
    there = example("annotators")
    sizes = {"classes": 3, "annotators": 5}
    item, annotator, label, *_ = there["simulate"](1000, **sizes)
    groups = by_group(item, annotator.astype(np.int32), label.astype(np.int32))
    args = tuple(map(jnp.asarray, (*groups.arrays, groups.mask)))

    def by_class(share: Any, confusion: Any, rows: Any = slice(None)) -> Any:
        who, what, mask = (x[rows] for x in args)
        found = jnp.log(confusion[who, :, what])  # items, labels, classes
        return jnp.log(share) + jnp.where(mask[..., None], found, 0.0).sum(1)

    def whole(*_: Any, classes: int, annotators: int) -> None:
        share = numpyro.sample("share", dist.Dirichlet(2 * jnp.ones(classes)))
        prior = dist.Dirichlet(jnp.ones(classes) + 2 * jnp.eye(classes))
        prior = prior.expand([annotators, classes]).to_event(2)
        confusion = numpyro.sample("confusion", prior)
        total = jax.nn.logsumexp(by_class(share, confusion), -1).sum()
        numpyro.factor("labels", total)

    def latent(found: Draws) -> Draws:
        def one(values: tuple[Any, Any]) -> Any:
            return jax.nn.softmax(by_class(*values, rows=SOME))

        probability = jax.jit(lambda v: jax.lax.map(jax.vmap(one), v))
        values = found["share"], found["confusion"]
        return {"true_class_probability": np.asarray(probability(values))}

    start = {
        "share": jnp.full(3, 1 / 3),
        "confusion": jnp.tile(0.15 + 0.55 * jnp.eye(3), (5, 1, 1)),
    }
    return Case(
        there["model"],
        whole,
        whole,
        args,
        latent,
        "Dawid-Skene, 1,000 items, 3 classes, 5 annotators",
        sizes,
        init_to_value(values=start),
        ("share", "confusion"),
    )


def species_counts() -> Case:
    """Structural zeros summed by hand, with the effects in the position of NUTS."""
    there = example("species_counts")
    true = [-0.2, 0.4, 0.3]
    X, counts, *_ = there["simulate"](500, np.array([0.3, 0.8, -0.5]), true, 0.7)
    X, counts = jnp.asarray(X), jnp.asarray(counts)

    def by_state(occupancy: Any, abundance: Any, effect: Any, rows: Any) -> Any:
        """Absent and present; up to what both have in common."""
        logits = X[rows] @ occupancy
        eta = X[rows] @ abundance + effect
        found = counts[rows]
        total = found.sum(-1)
        absent = -jax.nn.softplus(logits) + total * jnp.log(1e-6) - 3e-6
        rate = 3 * jnp.exp(eta)
        present = -jax.nn.softplus(-logits) + total * eta - rate
        return jnp.stack([absent, present], -1)

    def whole(X: Any, counts: Any) -> None:
        prior = dist.Normal(0, 1.5).expand([3]).to_event(1)
        occupancy = numpyro.sample("occupancy", prior)
        abundance = numpyro.sample("abundance", prior)
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        unit = dist.Normal(0, 1).expand([len(X)]).to_event(1)
        effect = sd * numpyro.sample("standardised", unit)
        numpyro.deterministic("effect", effect)
        found = by_state(occupancy, abundance, effect, slice(None))
        numpyro.factor("counts", jax.nn.logsumexp(found, -1).sum())

    def latent(found: Draws) -> Draws:
        def one(values: Any) -> Any:
            return jax.nn.softmax(by_state(*values, SOME))

        values = (
            found["occupancy"],
            found["abundance"],
            found["effect"][..., SOME],
        )
        probability = np.asarray(jax.jit(jax.vmap(jax.vmap(one)))(values))[..., 1]
        # given an effect, so that probabilities differ from those of `marginalize` in
        # spread; draws of the states do not
        present = np.random.default_rng(3).uniform(size=probability.shape) < probability
        return {
            "present": present.astype(float),
            "effect": np.asarray(found["effect"])[..., SOME],
        }

    x, log_w = grid(71)

    def by_hand(X: Any, counts: Any) -> None:
        prior = dist.Normal(0, 1.5).expand([3]).to_event(1)
        occupancy = numpyro.sample("occupancy", prior)
        abundance = numpyro.sample("abundance", prior)
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        total = counts.sum(-1)
        logits = X @ occupancy
        absent = -jax.nn.softplus(logits) + total * np.log(1e-6) - 3e-6
        eta = (X @ abundance)[:, None] + sd * x
        given = total[:, None] * eta - 3 * jnp.exp(eta)
        present = jax.nn.logsumexp(given + log_w, -1) - jax.nn.softplus(-logits)
        numpyro.factor("counts", jnp.logaddexp(absent, present).sum())

    return Case(
        there["model"],
        whole,
        by_hand,
        (X, counts),
        latent,
        "structural zeros and overdispersion, 500 sites, 3 visits",
        names=("occupancy", "abundance", "sd"),
    )


def capture_recapture() -> Case:
    """Cormack, Jolly and Seber, with the states summed by hand."""
    there = example("capture_recapture")
    args = tuple(map(jnp.asarray, there["simulate"](2000, 5)[:3]))
    mass, first, seen = args

    def latent(found: Draws) -> Draws:
        """Alive on the last occasion, by the recursion in double precision."""
        some = SOME
        logits = found["survival"] @ np.stack([np.ones(len(some)), mass[some]])
        stays = 1 / (1 + np.exp(-np.asarray(logits, float)))
        caught = 1 / (1 + np.exp(-np.asarray(found["capture"], float)))
        alive, dead = np.ones_like(stays), np.zeros_like(stays)
        for t in range(1, seen.shape[1]):
            p = caught[..., t - 1, None]
            now = np.asarray(seen[some, t]) == 1
            lives = alive * stays * np.where(now, p, 1 - p)
            dies = np.where(now, 0.0, dead + alive * (1 - stays))
            after = np.asarray(first[some]) < t
            alive = np.where(after, lives, alive)
            dead = np.where(after, dies, dead)
        chance = alive / (alive + dead)
        return {"alive_probability": chance}

    return Case(
        there["model"],
        there["recursion"],
        there["recursion"],
        args,
        latent,
        "Cormack-Jolly-Seber, 2,000 animals, 5 occasions",
        names=("survival", "capture"),
    )


def random_intercepts() -> Case:
    """A multilevel logistic regression, with the intercepts in the position of NUTS."""
    there = example("random_intercepts")
    rng = np.random.default_rng(1)
    covariates = rng.normal(size=(500, 6, 3)).astype(np.float32)
    logits = 1.2 * rng.normal(size=(500, 1)) + covariates @ np.array([0.5, -1.0, 0.25])
    recovered = rng.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))
    mask = np.arange(6) < rng.integers(3, 7, size=500)[:, None]
    args = tuple(map(jnp.asarray, (covariates, recovered.astype(np.float32), mask)))
    x, log_w = grid(36)

    def by_hand(covariates: Any, recovered: Any, mask: Any) -> None:
        slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([3]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        logits = (covariates @ slopes)[..., None] + tau * x
        each = recovered[..., None] * logits - jax.nn.softplus(logits)
        rows = jnp.where(mask[..., None], each, 0.0).sum(1)
        numpyro.factor("recovered", jax.nn.logsumexp(rows + log_w, -1).sum())

    return Case(
        there["model"],
        there["model"],
        by_hand,
        args,
        lambda found: {"intercept": found["intercept"][..., SOME]},
        "random intercepts, 500 clinics, 3 to 6 patients",
        names=("slopes", "tau"),
        settings={"batch_size": 50},
    )


def random_slopes() -> Case:
    """The same with random slopes, all in the position of NUTS."""
    there = example("random_slopes")
    treated, recovered, *_ = there["simulate"](2000)
    x, log_w = grid(36)
    both = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    weights = (log_w[:, None] + log_w).reshape(-1)
    # of eight patients every second one is treated: a clinic is two counts of four
    pairs = np.stack([recovered[:, 0::2].sum(1), recovered[:, 1::2].sum(1)], -1)
    counts, often = np.unique(pairs, axis=0, return_counts=True)

    def by_hand(treated: Any, recovered: Any) -> None:
        means = numpyro.sample("means", dist.Normal(0, 2).expand([2]).to_event(1))
        scales = numpyro.sample("scales", dist.HalfNormal(2).expand([2]).to_event(1))
        correlation = numpyro.sample("correlation", dist.Uniform(-1, 1))
        intercept, slope = there["effects"](both, means, scales, correlation)
        logits = jnp.stack([intercept, intercept + slope])
        rows = counts @ logits - 4 * jax.nn.softplus(logits).sum(0)
        total = often @ jax.nn.logsumexp(rows + weights, -1)
        numpyro.factor("recovered", total)

    return Case(
        there["model"],
        there["model"],
        by_hand,
        (jnp.asarray(treated), jnp.asarray(recovered)),
        lambda found: {"z": found["z"][..., SOME, :]},
        "random intercepts and slopes, 2,000 clinics, 8 patients",
        names=("means", "scales", "correlation"),
    )


def gaussian_mixture() -> Case:
    """Three components, with the members summed by hand."""
    there = example("gaussian_mixture")
    rng = np.random.default_rng(2)
    mean, sd = np.array([-2.0, 0.5, 3.0]), np.array([0.8, 0.6, 1.0])
    member = rng.choice(3, size=2000, p=[0.3, 0.45, 0.25])
    y = jnp.asarray(mean[member] + sd[member] * rng.normal(size=2000), jnp.float32)

    def by_member(mean: Any, sd: Any, weight: Any, rows: Any = slice(None)) -> Any:
        found = dist.Normal(mean, sd).log_prob(y[rows, None])
        return found + jnp.log(weight)

    def whole(y: Any) -> None:
        support = dist.constraints.ordered_vector
        mean = numpyro.sample("mean", dist.ImproperUniform(support, (), (3,)))
        numpyro.factor("prior", dist.Normal(0.0, 5.0).log_prob(mean).sum())
        sd = numpyro.sample("sd", dist.LogNormal(0.0, 0.5).expand([3]).to_event(1))
        weight = numpyro.sample("weight", dist.Dirichlet(2.0 * jnp.ones(3)))
        total = jax.nn.logsumexp(by_member(mean, sd, weight), -1).sum()
        numpyro.factor("y", total)

    def latent(found: Draws) -> Draws:
        def one(values: Any) -> Any:
            return jax.nn.softmax(by_member(*values, SOME))

        values = found["mean"], found["sd"], found["weight"]
        return {"member_probability": np.asarray(jax.vmap(jax.vmap(one))(values))}

    start = {"mean": jnp.array([-2.0, 0.5, 3.0])}
    return Case(
        there["model"],
        whole,
        whole,
        (y,),
        latent,
        "a mixture of three normal components, 2,000 rows",
        start=init_to_value(values=start),
        names=("mean", "sd", "weight"),
    )


CASES = {
    "random_intercepts": random_intercepts,
    "random_slopes": random_slopes,
    "gaussian_mixture": gaussian_mixture,
    "annotators": annotators,
    "item_response": item_response,
    "species_counts": species_counts,
    "capture_recapture": capture_recapture,
}
