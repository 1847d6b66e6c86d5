"""The table of mutants is of the package as it is."""

import importlib.util
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_each_line_of_the_table_is_in_the_package_once_and_names_tests():
    spec = importlib.util.spec_from_file_location("mutants", TESTS / "mutants.py")
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    table = mutants.read()
    assert len(table) > 100
    for file, old, new, paths in table:
        assert old != new, file
        for path in paths:
            assert (TESTS / path).exists(), (file, path)
