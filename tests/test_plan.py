import json

import pytest

from attnworks import Plan
from attnworks.hardware import detect
from attnworks.plan import best_plan
from helpers import problem_of, randn


@pytest.mark.parametrize("field", ["tile_q", "tile_kv", "split_kv"])
@pytest.mark.parametrize("wrong", [-1, 1.5, "16", True, None, 2**31])
def test_numbers_are_checked(field, wrong):
    with pytest.raises(ValueError, match=rf"Plan {field}: was {wrong!r}, must be an int in 0"):
        Plan("cpu", "tiled", **{field: wrong})


@pytest.mark.parametrize("field", ["backend", "schedule", "isa"])
def test_names_are_checked(field):
    with pytest.raises(TypeError, match=rf"Plan {field}: was \['x'\], must be a str"):
        Plan(**{"backend": "cpu", "schedule": "tiled", field: ["x"]})


def test_plans_are_values():
    plan = Plan("cpu", "tiled", tile_q=48, tile_kv=512, isa="avx2")
    assert plan == Plan(**json.loads(json.dumps(plan.to_json())))
    assert len({plan, Plan("cpu", "tiled", tile_q=48, tile_kv=512, isa="avx2")}) == 1


def test_the_least_modelled_time_wins_and_order_decides_between_equals():
    q = randn(1, 1, 4096, 64)
    problem = problem_of(q, q, q)
    machine = detect("cpu")
    small, large = (Plan("cpu", "tiled", tile_q=tile, tile_kv=256) for tile in (16, 256))
    assert best_plan(problem, [small, large], machine) == large, "a larger Q tile reads K and V less often"
    first, second = (Plan("cpu", "tiled", tile_q=64, tile_kv=256, isa=isa) for isa in ("a", "b"))
    assert best_plan(problem, [first, second], machine) == first
