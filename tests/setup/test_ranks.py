"""The rows of a mesh of one dimension."""

import pytest
from dmuon._setup.resolve_ranks import _hosts


@pytest.mark.parametrize(
    ("row", "local_size", "rows"),
    [
        ((0, 1, 2, 3), 2, ((0, 1), (2, 3))),
        ((2, 3, 0, 1), 2, ((2, 3), (0, 1))),
        ((0, 2, 4, 6), 4, ((0, 2), (4, 6))),
        ((0, 1, 2, 3), 4, ((0, 1, 2, 3),)),  # one host
        ((0, 1, 2, 3), 0, ((0, 1, 2, 3),)),  # nothing is known of hosts
        ((0, 1, 2, 3), 1, ((0, 1, 2, 3),)),  # a node copy would be the whole model
        ((0, 2, 4), 2, ((0, 2, 4),)),
        ((0, 1, 2, 3), 3, ((0, 1, 2, 3),)),  # hosts of different sizes
        ((0, 2, 1, 3), 2, ((0, 2, 1, 3),)),  # a host's ranks do not follow each other
    ],
)
def test_hosts_make_rows_where_each_has_equally_many_ranks_that_follow_each_other(row, local_size, rows):
    assert _hosts(row, local_size) == rows
