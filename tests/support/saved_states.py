"""States of every form in one file, so that later versions show that they load them.

    PYTHONPATH=. python tests/support/saved_states.py tests/checkpoints/data/1.0.0.npz

The file in the repository was made by the code of version 1.0.0. Do not make it anew:
add one for a version that changes what a state holds.
"""

import json
import sys

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from trained_forms import FORMS, start_of, train

import optax_mp

NAMES = [name for name in FORMS if not name.startswith("scaled")]
NAMES += ["scaled full copy", "scaled 5.1 bytes", "scaled partition"]
NAMES.remove("bare")
NAMES.remove("average")  # of a later version


def names_of(tree):
    """Return the leaves of a tree, by their paths in words."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def save(path):
    """Write params, state and masters of each form after five steps."""
    arrays, dtypes = {}, {}
    for name in NAMES:
        params, state = run = train(name, *start_of(name), range(5))
        masters = optax_mp.master_params(state, params)
        for part, tree in {"run": run, "masters": masters}.items():
            for where, leaf in names_of(tree).items():
                is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                leaf = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
                key = f"{name}|{part}|{where}"
                dtypes[key] = leaf.dtype.name
                # NumPy's files know no bfloat16.
                arrays[key] = leaf.view(f"u{leaf.dtype.itemsize}")
    np.savez_compressed(path, dtypes=json.dumps(dtypes), **arrays)


def load(path, name, part):
    """Return the arrays of a form, by their paths in words."""
    with np.load(path) as file:
        dtypes = json.loads(str(file["dtypes"]))
        start = f"{name}|{part}|"
        return {
            key.removeprefix(start): file[key].view(jax.numpy.dtype(dtype))
            for key, dtype in dtypes.items()
            if key.startswith(start)
        }


if __name__ == "__main__":
    save(sys.argv[1])
