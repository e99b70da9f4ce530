"""The scans of a model, as messages that can be changed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.primitives import Messenger

__all__ = ["EachScan", "SameTypes", "like_before"]


class EachScan(Messenger):
    """Apply a function to each scan of a model, and to no other control flow."""

    def __init__(self, fn: Any = None) -> None:
        self.count = 0
        super().__init__(fn)

    def __enter__(self) -> Any:
        self.count = 0
        return super().__enter__()

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "control_flow" and msg["fn"] is scan_wrapper:
            self.at_scan(msg, self.count)
            self.count += 1

    def at_scan(self, msg: Any, index: int) -> None:
        """Change the message of a scan.

        :param msg: the message.
        :param index: the position of the scan among those of the model.
        """
        raise NotImplementedError


class SameTypes(EachScan):
    """Carry values in the types of the first step.

    A set-up in double precision also runs models that were written for single
    precision, in which a discrete site may have another integer type.
    """

    def at_scan(self, msg: Any, index: int) -> None:
        step, *rest = msg["args"]

        def same(carry: Any, x: Any) -> Any:
            new, y = step(carry, x)
            return like_before(new, carry), y

        msg["args"] = (same, *rest)


def like_before(new: Any, old: Any) -> Any:
    """The carry of a step, in the shapes and types of the carry that it received.

    States from a support may have other integer types than the user's first ones.
    """

    def one(x: Any, like: Any) -> Array:
        x = jnp.asarray(x, jnp.result_type(like))
        return x.reshape(jnp.shape(like)) if x.size == jnp.size(like) else x

    return jax.tree.map(one, new, old)
