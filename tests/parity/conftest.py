import importlib

import pytest


@pytest.fixture(scope="session")
def oracle():
    """The oracle is imported only where its tests run: PyTorch and transformers are in no other environment."""
    return importlib.import_module("tests.parity.oracle")
