"""The parallel plan: who trains which rows, sends which bytes and reads which files."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.training.parallel.plan import ParallelPlan


def torchrun(rank: int, world_size: int, *, here: int | None = None) -> dict[str, str]:
    count = world_size if here is None else here
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % count),
        "LOCAL_WORLD_SIZE": str(count),
    }


def plans(world_size: int, **sizes: int) -> list[ParallelPlan]:
    return [ParallelPlan.from_environment(torchrun(rank, world_size), **sizes) for rank in range(world_size)]


def test_a_process_without_torchrun_is_alone_and_does_everything() -> None:
    plan = ParallelPlan.from_environment({})
    assert plan == ParallelPlan()
    assert all((plan.is_alone, plan.leads, plan.on_one_host))
    assert (plan.world_size, plan.dp_size, plan.num_senders, plan.mesh_shape) == (1, 1, 1, {"fsdp": 1})


def test_every_row_is_trained_by_one_rank() -> None:
    sample = TrainSample(token_ids=np.arange(4, dtype=np.int32), loss_mask=np.ones(4, bool), logprobs=np.zeros(4))
    rows = pack_samples([sample] * 8, seq_len=4, dp_size=4).micro_batches
    own = [plan.own_rows(rows) for plan in plans(4, dp_replicate=2)]
    assert [len(part) for part in own] == [2] * 4
    assert sorted(id(row) for part in own for row in part) == sorted(map(id, rows))


def test_ranks_that_share_a_row_train_it_together_and_one_of_them_reports_it() -> None:
    sample = TrainSample(token_ids=np.arange(4, dtype=np.int32), loss_mask=np.ones(4, bool), logprobs=np.zeros(4))
    shared = plans(4, cp=2)
    rows = pack_samples([sample] * 4, seq_len=4, dp_size=shared[0].dp_size).micro_batches
    own = [[id(row) for row in plan.own_rows(rows)] for plan in shared]
    assert own[0] == own[1] != own[2] == own[3]
    assert [plan.reports for plan in shared] == [True, False, True, False]
    assert {(plan.num_senders, plan.mesh_shape["fsdp"]) for plan in shared} == {(4, 4)}


def test_ranks_that_share_products_have_the_same_rows() -> None:
    shared = plans(8, cp=2, tp=2, ep=4)
    assert [plan.dp_rank for plan in shared] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [plan.reports for plan in shared] == [True, False, False, False] * 2
    assert (shared[0].mesh_shape, shared[0].experts_shape) == ({"fsdp": 4, "tp": 2}, {"efsdp": 2, "ep": 4})


def test_the_first_copy_sends_a_version() -> None:
    assert {plan.num_senders for plan in plans(4)} == {4}
    hybrid = plans(4, dp_replicate=2)
    assert {(plan.num_senders, plan.shards) for plan in hybrid} == {(2, 2)}
    assert hybrid[0].mesh_shape == {"dp_replicate": 2, "fsdp": 2}


def test_each_file_is_read_by_one_rank() -> None:
    names = [f"file-{index}" for index in range(7)]
    assert sorted(name for plan in plans(3) for name in plan.share(names)) == names


def test_ranks_on_two_machines_are_not_on_one_host() -> None:
    plan = ParallelPlan.from_environment(torchrun(3, 4, here=2))
    assert (plan.local_rank, plan.on_one_host, plan.leads) == (1, False, False)


def test_ranks_divide_experts_before_fsdp_shards_them() -> None:
    divided = plans(8, ep=4)
    assert divided[0].experts_shape == {"efsdp": 2, "ep": 4}
    assert divided[0].row_order == (0, 2, 4, 6, 1, 3, 5, 7)  # ranks 0 and 4 have the experts of parts 0 and 1
    assert plans(4, ep=4)[0].row_order == (0, 1, 2, 3)
    assert plans(4, dp_replicate=2, ep=2)[0].experts_shape == {"dp_replicate": 2, "efsdp": 1, "ep": 2}


@pytest.mark.parametrize(
    ("ranks", "sizes", "told"),
    [
        (1, {"cp": 2}, r"model\.cp must divide the number of ranks \(1\), got 2; .* change deployment\.num_train_gpus"),
        (4, {"dp_replicate": 3}, r"model\.dp_replicate must divide the number of ranks \(4\), got 3"),
        (6, {"cp": 4}, r"model\.cp must divide the number of ranks \(6\), got 4"),
        (4, {"cp": 2, "tp": 4}, r"model\.tp must divide .* \(4, divided by 2 already for model\.cp\), got 4"),
        (4, {"ep": 3}, r"model\.ep must divide the ranks that hold a copy of the model \(4\), got 3"),
        (4, {"dp_replicate": 2, "ep": 4}, r"hold a copy of the model \(2\), got 4"),
        (4, {"dp_replicate": 2, "cp": 4}, r"ranks \(4, divided by 2 already for model\.dp_replicate\), got 4"),
    ],
)
def test_replicas_and_ranks_that_share_must_divide_the_ranks(ranks: int, sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ParallelPlan.from_environment(torchrun(0, ranks), **sizes)


def test_a_rank_beyond_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        ParallelPlan(rank=2, dp_shard=2)
