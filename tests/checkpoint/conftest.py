"""A store for the tests of checkpoints."""

import re

import pytest
from store_servers import s3_door


@pytest.fixture(scope="module")
def door():
    """S3 behind a server that fails when told to, with an empty bucket."""
    with s3_door("runs") as door:
        yield door


@pytest.fixture
def bucket(door, request):
    """The address of an empty store. The server obeys again afterwards."""
    yield "s3://runs/" + re.sub(r"\W", "-", request.node.name)
    door.rule = None
    door.failures.clear()
