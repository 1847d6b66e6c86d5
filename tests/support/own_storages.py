"""Storages as a user would write them, by the contract alone."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Negated:
    """Keep minus the master."""

    param_is_part = False

    def takes(self, param_dtype, master_dtype):
        return jnp.finfo(param_dtype).bits < jnp.finfo(master_dtype).bits

    def encode(self, master, param):
        return -master

    def decode(self, stored, param):
        return -stored

    def advance(self, stored, param, master):
        return -master, master


@dataclasses.dataclass(frozen=True)
class TwoBfloat16:
    """Keep a float32 master as the sum of two bfloat16: 16 bits of its mantissa."""

    param_is_part = False

    def takes(self, param_dtype, master_dtype):
        return master_dtype == jnp.float32

    def encode(self, master, param):
        # Not by a pair of casts, which XLA may leave out.
        high = jax.lax.reduce_precision(master, 8, 7)
        low = jnp.where(jnp.isfinite(master), master - high, 0)
        return {"high": high.astype(jnp.bfloat16), "low": low.astype(jnp.bfloat16)}

    def decode(self, stored, param):
        return stored["high"].astype(jnp.float32) + stored["low"].astype(jnp.float32)

    def advance(self, stored, param, master):
        stored = self.encode(master, param)
        return stored, self.decode(stored, param)


@dataclasses.dataclass(frozen=True)
class Coarse:
    """Keep a master as a multiple of 2^-8, rounded up or down at random."""

    param_is_part = False
    is_random = True

    def takes(self, param_dtype, master_dtype):
        return master_dtype == jnp.float32

    def encode(self, master, param):
        return jnp.round(master * 256).astype(jnp.int16)

    def decode(self, stored, param):
        return stored.astype(jnp.float32) / 256

    def advance(self, stored, param, master, key):
        # Keys are data: any generator takes them.
        uniform = jax.random.uniform(jax.random.key(key[0]), master.shape)
        stored = jnp.floor(master * 256 + uniform).astype(jnp.int16)
        return stored, self.decode(stored, param)
