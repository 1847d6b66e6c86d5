"""Tables of reports: what tells rows apart is in them."""

import jax.numpy as jnp

import optax_mp
from optax_mp._table import Table

PATHS = [
    f"['params']['decoder']['layers'][{i}]['attention']['query']['kernel']"
    for i in (0, 1)
]


def test_columns_are_aligned():
    table = Table(
        [("role", "of", "bytes"), ("mu", "a", "8"), ("params", "bc", "16")], 2
    )
    assert str(table).splitlines() == [
        "role    of  bytes",
        "mu      a       8",
        "params  bc     16",
    ]


def test_a_path_is_whole_in_the_reports_of_leaves():
    params = {"params": {"decoder": {"layers": [
        {"attention": {"query": {"kernel": jnp.ones(3)}}} for _ in PATHS
    ]}}}  # fmt: skip
    for report in (
        optax_mp.gradient_range_report(params),
        optax_mp.update_report(params, params),
    ):
        rows = str(report).splitlines()[2:4]
        assert [row.split("  ")[0] for row in rows] == PATHS
