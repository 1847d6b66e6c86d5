"""Products inside equations that amp binds whole: they stay as written."""

from collections.abc import Iterator

from optax_mp._jax._jaxpr import AnyJaxpr, Equation, jaxprs_within, open_jaxpr
from optax_mp._jax._products import is_product
from optax_mp.amp._plan import Action


def unplanned_products(
    equation: Equation, action: Action
) -> Iterator[tuple[Equation, Action, int]]:
    """Yield the products in the jaxprs of an equation that have no plan.

    Such are those of a linear solver, of a kernel, and of what `amp_stop` leaves alone.

    Args:
        equation: the equation.
        action: what becomes of it.

    Yields:
        A product, what becomes of it, and how often it runs; the body of a while loop
        counts once.
    """
    if not action.regions:
        as_written = Action("bind", (), (), "as_written", action.why)
        for jaxpr in jaxprs_within(equation):
            for product, runs in _products(jaxpr):
                yield product, as_written, runs * equation.params.get("length", 1)


def _products(jaxpr: AnyJaxpr) -> Iterator[tuple[Equation, int]]:
    for equation in open_jaxpr(jaxpr)[0].eqns:
        if is_product(equation):
            yield equation, 1
        for inner in jaxprs_within(equation):
            for product, runs in _products(inner):
                yield product, runs * equation.params.get("length", 1)
