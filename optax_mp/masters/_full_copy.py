"""FullCopy: the whole master, beside the param."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from optax_mp._dtypes import bits


@dataclass(frozen=True)
class FullCopy:
    """Keep every master as it is: 4 bytes per weight for float32 masters.

    The default. It loses nothing, for any `master_dtype` and for params of any floating
    dtype. If you edit a param outside of the optimizer, it is the new master in the
    next step with float32 updates; before one with 16-bit updates call
    `follow_params`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.FullCopy())
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> state.master_params["w"].dtype.name, state.master_params["w"].nbytes
        ('float32', 8)
    """

    @property
    def param_is_part(self) -> bool:
        """False: what is stored is the master itself."""
        return False

    def takes(self, param_dtype: jnp.dtype, master_dtype: jnp.dtype) -> bool:
        """Return whether the param is narrower than the master."""
        return bits(param_dtype) < bits(master_dtype)

    def encode(self, master: jax.Array, param: jax.Array) -> jax.Array:
        """Return the master itself."""
        del param
        return master

    def decode(self, stored: jax.Array, param: jax.Array) -> jax.Array:
        """Return the stored master."""
        del param
        return stored

    def advance(
        self, stored: jax.Array, param: jax.Array, master: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the new master twice: to store it, and to round the param from it."""
        del stored, param
        return master, master
