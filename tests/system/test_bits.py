"""The claims of bits that also run on other CPUs: `tests/arm.sh`."""

import pytest
from bit_claims import CLAIMS


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_of_bits_hold(claim):
    CLAIMS[claim]()
