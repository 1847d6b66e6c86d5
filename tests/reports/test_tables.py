"""Tables of reports: what tells rows apart is in them."""

from optax_mp._table import Table

PATHS = [
    f"['params']['decoder']['layers'][{i}]{rest}"
    for i in (0, 1)
    for rest in ("['attention']['query']['kernel'] and 3 more", "['norm']")
]


def test_a_long_path_keeps_the_keys_that_tell_it_apart():
    table = Table([["param"], *([path] for path in PATHS)], width=20)
    # What no two may share is wider, and then there is room for the others.
    assert table.as_text().splitlines()[1:] == [
        "...[0]['attention']['query']['kernel'] and 3 more",
        "['params']['decoder']['layers'][0]['norm']",
        "...[1]['attention']['query']['kernel'] and 3 more",
        "['params']['decoder']['layers'][1]['norm']",
    ]


def test_a_long_text_without_keys_keeps_its_end():
    table = Table([["place"], ["a long text " * 9 + "at its end"]], width=20)
    assert table.as_text().splitlines()[1] == "...g text at its end"
