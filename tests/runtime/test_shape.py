"""What makes a model one whose replicas cannot be dropped, what tells replicas of two jobs apart,
and the sentences that say so."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from runtime.data import Batches
from runtime.replica.shape import cannot_drop, describe, difference, of_loop, of_ranks
from runtime.whole import WholeJob


@pytest.fixture(scope="module")
def _one_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


#: As they are named elsewhere; neither runs without processes of its own.
PipelineStage = type("PipelineStage", (), {})
DeepSpeedEngine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
ZeroRedundancyOptimizer = type("ZeroRedundancyOptimizer", (), {})


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def divided() -> nn.Module:
    made = model()
    fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    return made


def test_a_plain_model_can() -> None:
    assert cannot_drop(model()) == ""


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_divided_among_the_replica_s_ranks_can() -> None:
    assert cannot_drop(divided(), 0, 1) == ""


@pytest.mark.usefixtures("_one_process_group")
def test_an_optimizer_whose_state_is_divided_otherwise_is_refused_at_the_start() -> None:
    parted, whole = divided(), model()
    others = [torch.optim.Adafactor(one.parameters()) for one in (parted, whole)]

    assert "its optimizer is Adafactor" in cannot_drop(parted, 0, 1, others[:1])
    assert cannot_drop(whole, 0, 1, others[1:]) == ""


def test_ranks_with_a_whole_model_each_are_no_replica() -> None:
    assert "this is rank 1 of 2 of its replica, and its model is not divided" in cannot_drop(
        model(), 1, 2
    )


@pytest.mark.usefixtures("_one_process_group")
def test_a_wrapped_model_is_to_be_given_bare() -> None:
    wrapped = nn.parallel.DistributedDataParallel(model())

    assert "give ReplicaGroup the bare model" in cannot_drop(wrapped)


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_divided_among_others_than_the_replica_s_ranks_is_refused() -> None:
    told = cannot_drop(divided(), 0, 2)

    assert "the parameter 0.weight is divided among 1 processes, S(0), and the launcher" in told
    assert "a replica has 2" in told


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_divided_in_part_is_to_be_divided_whole() -> None:
    partly = model()
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (1,)))
    ignoring = model()
    ignored = set(ignoring[0].parameters())
    fully_shard(ignoring, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)

    assert "not by fully_shard called on the model" in cannot_drop(partly)
    assert "the parameter 0.weight is whole on each rank and 1.weight" in cannot_drop(ignoring)


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_replicated_beside_is_refused() -> None:
    both = model()
    fully_shard(both, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s")))

    told = cannot_drop(both)

    assert "the parameter 0.weight is divided among processes in more than one way, R, S(0)" in told
    assert "a restart from its checkpoint" in told


@pytest.mark.usefixtures("_one_process_group")
def test_tensor_parallel_parameters_are_named() -> None:
    parallel = parallelize_module(model(), init_device_mesh("cpu", (1,)), {"1": ColwiseParallel()})

    assert "the parameter 1.weight is divided among processes" in cannot_drop(parallel)


def test_parameters_elsewhere_are_named() -> None:
    assert "the parameter 0.weight is on meta" in cannot_drop(model().to("meta"))


@pytest.mark.parametrize(
    ("spanning", "remedy"),
    [
        (PipelineStage(), "a restart from its checkpoint, in a runtime.WholeJob"),
        (DeepSpeedEngine(), "is given runtime.adapters.deepspeed.EngineState(engine)"),
    ],
)
def test_what_spans_all_processes_says_how_such_a_job_is_recovered(
    spanning: nn.Module, remedy: str
) -> None:
    told = cannot_drop(spanning)

    assert f"the model is a {type(spanning).__name__}, which spans all processes" in told
    assert remedy in told


def test_a_job_that_restarts_as_a_whole_wants_the_engine_of_what_deepspeed_divided() -> None:
    job: Any = SimpleNamespace(world_replicas=1, standby="")
    saver: Any = None
    divided, optimized = model(), model()
    divided.get_parameter("1.weight").ds_id = 3  # type: ignore[attr-defined]
    optimized.get_parameter("1.weight")._hp_mapping = object()  # type: ignore[attr-defined]

    for given in (DeepSpeedEngine(), divided, optimized):
        with pytest.raises(ValueError, match=r"deepspeed\.EngineState\(engine\)"):
            WholeJob(job, given, [], saver)


def test_parameters_that_deepspeed_divided_are_named() -> None:
    made = model()
    made.get_parameter("1.weight").ds_id = 3  # type: ignore[attr-defined]

    assert "the parameter 1.weight is divided among all processes by DeepSpeed's" in cannot_drop(
        made
    )


def test_an_optimizer_that_spans_all_processes_is_named() -> None:
    told = cannot_drop(model(), optimizers=[ZeroRedundancyOptimizer()])

    assert "the optimizer is a ZeroRedundancyOptimizer, which spans all processes" in told


def test_what_is_no_module_is_named() -> None:
    assert "the model is a dict: give ReplicaGroup a torch.nn.Module" in cannot_drop({})  # type: ignore[arg-type]


def shape_of(rates: list[float], **helpers: list[object]) -> dict[str, str]:
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in rates))
    groups = [
        {"params": [*layer.parameters()], "lr": lr} for layer, lr in zip(made, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    return describe(
        made, [optimizer], Batches(samples=96, shards=12), "cover", 1.0, "torch", 1, helpers
    )


def test_rates_of_groups_of_parameters_tell_optimizers_apart() -> None:
    same = difference(shape_of([0.1, 0.2]), shape_of([0.1, 0.2]))
    told = difference(shape_of([0.1, 0.2]), shape_of([0.1, 0.1]))
    many = difference(shape_of([0.2] * 6), shape_of([0.2] * 5 + [0.3]))

    assert same == ""
    assert "this replica's optimizer is AdamW(" in told
    assert "; of 2 tensors lr=0.2), the job's is" in told
    assert "others in 6 groups (" in many


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ((100, 1000, None), "number of steps is 100, the job's is without end"),
        ((None, 0, None), "compare_every is 0, the job's is 1000"),
        ((None, 1000, print), "after_step is one, the job's is none"),
        ((None, 1000, None), ""),
    ],
)
def test_loops_that_would_not_go_on_together_are_told_apart(
    loop: tuple[int | None, int, object], words: str
) -> None:
    assert words in difference(of_loop(*loop), of_loop(None, 1000, None))
    assert bool(words) == bool(difference(of_loop(*loop), of_loop(None, 1000, None)))


def of_rank(**given: Any) -> dict[str, str]:
    """What a rank is compared by with the first of its replica."""
    said: dict[str, Any] = {
        "seed": 7, "data": None, "mode": "cover", "clip": 1.0, "numerics": "torch", "rate": 0.1,
        "between": nn.ReLU(), "steps": None, "compare_every": 1000, "after_step": None,
        "helpers": {}, **given,
    }  # fmt: skip
    made = nn.Sequential(nn.Linear(4, 4), said["between"])
    batches = Batches(said["data"], samples=96, shards=12, seed=said["seed"])
    optimizer = torch.optim.SGD(made.parameters(), lr=said["rate"])
    shape = describe(
        made, [optimizer], batches, said["mode"], said["clip"], said["numerics"], 2,
        {"extra mine": [nn.Identity()]},
    ) | of_loop(said["steps"], said["compare_every"], said["after_step"])  # fmt: skip
    return of_ranks(shape, said["helpers"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seed": 8}, "this rank's data order's seed is 8, the first one's is 7: give all ranks"),
        ({"data": [1] * 96}, "this rank's dataset is list, the first one's is ids alone: give all"),
        ({"mode": "drop"}, "mode is drop, the first one's is cover: start all ranks with the same"),
        ({"clip": 2.0}, "largest gradient norm is 2, the first one's is 1: start all ranks with"),
        ({"rate": 0.2}, "this rank's optimizer is SGD(dampening=0 differentiable=False lr=0.2"),
        ({"between": nn.GELU()}, "modules is 1 GELU, 1 Linear, 1 Sequential, the first one's is"),
        ({"helpers": {"schedule": [nn.Identity()]}}, "extras is schedule Identity, the first"),
        ({"after_step": print}, "this rank's after_step is one, the first one's is none: start"),
    ],
)
def test_ranks_of_one_replica_that_would_train_otherwise_are_told_apart(
    given: dict[str, Any], words: str
) -> None:
    told = difference(of_rank(**given), of_rank(), "the first one's", "rank")

    assert words in told


@pytest.mark.parametrize(
    "given", [{"numerics": "another card"}, {"steps": 100}, {"compare_every": 0}]
)
def test_ranks_of_one_replica_may_differ_in_what_no_other_rank_hangs_on(
    given: dict[str, Any],
) -> None:
    assert difference(of_rank(**given), of_rank()) == ""


class OfARank(nn.Module):
    """Tells which rank it is on."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


def test_what_a_module_says_of_itself_may_be_of_its_rank() -> None:
    first, second = (of_rank(between=OfARank(rank)) for rank in (0, 1))

    assert difference(second, first) == ""


class Rows(torch.utils.data.Dataset[int]):
    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 96

    def __getitem__(self, sample: int) -> int:
        return sample


def test_datasets_of_equal_length_are_told_apart_by_their_kind_and_fingerprint() -> None:
    def shape(data: object) -> dict[str, str]:
        return describe(model(), [], Batches(data, shards=12), "cover", 1.0, "torch")

    told = difference(shape(Rows("a1")), shape(Rows("b2")))

    assert told.startswith("this replica's dataset is Rows a1, the job's is Rows b2: give all")
    assert "dataset is list, the job's is Rows b2" in difference(
        shape(list(range(96))), shape(Rows("b2"))
    )
    assert difference(shape(Rows("a1")), shape(Rows("a1"))) == ""


def test_models_of_equal_tensors_are_told_apart_by_their_modules() -> None:
    def shape(*between: nn.Module) -> dict[str, str]:
        made = nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 2))
        return describe(made, [], Batches(samples=96, shards=12), "cover", 1.0, "torch")

    kind = difference(shape(nn.GELU()), shape(nn.ReLU()))
    setting = difference(shape(nn.Dropout(0.1)), shape(nn.Dropout(0.5)))

    assert kind.startswith("this replica's set of modules is 1 GELU, 2 Linear, 1 Sequential (")
    assert "the job's is 2 Linear, 1 ReLU, 1 Sequential (" in kind
    assert "set of modules is 1 Dropout, 2 Linear, 1 Sequential (" in setting
    assert difference(shape(nn.Dropout(0.5)), shape(nn.Dropout(0.5))) == ""


def test_replicas_that_train_other_weights_of_a_model_are_told_apart() -> None:
    def shape(frozen: str) -> dict[str, str]:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        made.get_submodule(frozen).requires_grad_(False)
        return describe(made, [], Batches(samples=96, shards=12), "cover", 1.0, "torch")

    fewer = difference(shape(""), shape("0"))
    others = difference(shape("1"), shape("0"))

    assert fewer.startswith("this replica's set of trained weights is 0 parameters (")
    assert "the job's is 20 parameters (" in fewer
    assert others.startswith("this replica's set of trained weights is 20 parameters (")
    assert difference(shape("1"), shape("1")) == ""


class Told(nn.Module):
    """Tells of itself where it lies in memory, as what has no words of its own does."""

    def __init__(self, card: int = 0) -> None:
        super().__init__()
        self.card = card

    def extra_repr(self) -> str:
        """And on which card, as torch's own ParameterList does."""
        return f"norm={object()!r} (cuda:{self.card}) (GPU {self.card})"


def test_where_a_module_lies_tells_nobody_apart() -> None:
    def shape(card: int) -> dict[str, str]:
        return describe(Told(card), [], Batches(samples=96, shards=12), "cover", 1.0, "torch")

    assert difference(shape(0), shape(1)) == ""


class OfTheScript:
    """A schedule that keeps what is not the same everywhere."""

    def __init__(self, began: float) -> None:
        self.began = began

    def state_dict(self) -> dict[str, object]:
        return {"began": self.began, "device": f"cuda:{self.began}"}


def test_of_what_a_schedule_of_the_script_s_own_keeps_nothing_is_compared() -> None:
    one, other = (shape_of([0.1], schedule=[OfTheScript(began)]) for began in (1.0, 2.0))

    assert difference(one, other) == ""


def test_a_schedule_of_many_numbers_is_told_by_their_hash() -> None:
    def schedule(last: int) -> object:
        optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [*range(5000), last])

    shape = shape_of([0.1], schedule=[schedule(6000)])

    assert len(shape["helpers"]) < 100
    assert "schedule MultiStepLR(" in difference(shape, shape_of([0.1], schedule=[schedule(7000)]))


def test_a_rate_that_is_a_tensor_tells_optimizers_apart() -> None:
    def shape(rate: float) -> dict[str, str]:
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=torch.tensor(rate))
        return describe(made, [optimizer], Batches(samples=96, shards=12), "cover", 1.0, "torch")

    assert "lr=0.25 maximize" in difference(shape(0.25), shape(0.5))
    assert difference(shape(0.5), shape(0.5)) == ""


def test_another_schedule_s_or_scaler_s_settings_tell_scripts_apart() -> None:
    def schedule(after: int) -> object:
        optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, after, 0.5)
        same = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [same, halved], [10])

    def scaler(scale: float) -> object:
        return torch.amp.GradScaler("cpu", init_scale=scale)

    told = difference(
        shape_of([0.1], schedule=[schedule(20)]), shape_of([0.1], schedule=[schedule(30)])
    )
    scale = difference(shape_of([0.1], scaler=[scaler(2.0)]), shape_of([0.1], scaler=[scaler(4.0)]))
    same = difference(
        shape_of([0.1], schedule=[schedule(20)]), shape_of([0.1], schedule=[schedule(20)])
    )

    assert "schedule SequentialLR(" in told
    assert "_schedulers.1.step_size=20" in told
    assert "_schedulers.1.step_size=30" in told
    assert "scaler GradScaler(" in scale
    assert "scale=2.0" in scale
    assert same == ""


def test_another_schedule_tells_scripts_apart() -> None:
    told = difference(shape_of([0.1], schedule=[nn.Identity()]), shape_of([0.1]))

    assert "extras is schedule Identity, the job's is none: start all replicas with" in told
