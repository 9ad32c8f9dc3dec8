"""The global batch does not depend on the world."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.config import Config
from elastic.planner import search


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 200))
def test_shares_cover_the_batch(samples: int, micro: int, world: int) -> None:
    world = min(world, samples)
    config = Config.model_validate({"batch": {"global_samples": samples, "micro_samples": micro}})
    plan = search.choose(config, world)
    assert sum(plan.shares) == samples and max(plan.shares) - min(plan.shares) <= 1
    ranges = [plan.share_of(rank) for rank in range(world)]
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(samples))
    rows = -(-max(plan.shares) // plan.micro_batches)
    assert rows <= micro or plan.micro_batches == min(plan.shares)
