"""Keys and certificates for all tests of the wire."""

import pytest

from wire_ends import Consortium


@pytest.fixture(scope="session")
def consortium(tmp_path_factory):
    return Consortium(tmp_path_factory.mktemp("consortium"))
