"""What a lost peer means for the words of set-up."""

import pytest
import torch.distributed as dist
from dmuon._setup.agreement import exchange


def test_a_failure_says_that_a_rank_was_lost():
    lost = "Connection closed by peer"
    words = rf"dmuon: .* failed: a rank died, or did not come\. Reported: {lost}"
    with pytest.raises(RuntimeError, match=words), exchange():
        raise dist.DistBackendError(lost)
