"""Where an equation is written; off with a warning if JAX renames what says it."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import optax_mp
from optax_mp import jaxprs
from optax_mp.jaxprs import _source


def square(x):
    return x * x


# What is asked, the answer, that without the fact, and the name that JAX changes.
FACTS = {
    "is_transposed": (
        lambda ask: set(map(ask, jax.make_jaxpr(jax.grad(square))(1.0).eqns)),
        ({True, False}, {False}),
        "_TRANSPOSE",
    ),
    "place_of": (
        lambda ask: __file__ in ask(jax.make_jaxpr(square)(1.0).jaxpr),
        (True, False),
        "_SOURCE",
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_what_jax_renames_is_off_with_one_warning(name, monkeypatch):
    run, (answer, without), text = FACTS[name]
    ask = getattr(_source, name)
    ask.is_known.cache_clear()
    assert run(ask) == answer
    ask.is_known.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(_source, text, "renamed")
        with pytest.warns(optax_mp.MixedPrecisionWarning, match=f"JAX .* as `{name}`"):
            assert not ask.is_known()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(ask) == without
    ask.is_known.cache_clear()


def named(x):
    with jax.named_scope("outer"):
        y = jnp.sin(x)
        with jax.named_scope("inner"):
            return y * 2.0


def test_an_equation_names_its_scopes_and_its_line():
    equations = jax.make_jaxpr(named)(1.0).eqns
    assert list(map(_source.scopes, equations)) == ["outer", "outer/inner"]
    first = named.__code__.co_firstlineno
    lines = [f"test_source.py:{first + 2}", f"test_source.py:{first + 4}"]
    assert list(map(_source.source_line, equations)) == lines


def test_the_folder_imports_nothing_else_of_the_package_but_jax():
    folder = Path(jaxprs.__file__).parent
    for path in folder.glob("*.py"):
        for found in re.findall(r"from (optax_mp.*)", path.read_text()):
            allowed = r"optax_mp\.(core\.jax_api|jaxprs)\b"
            assert re.match(allowed, found), f"{path.name}: {found}"
