"""What programs written for Horovod do: collectives, process sets, uneven data, wrong use, options of the optimizer."""

from __future__ import annotations

import pytest
from cases import slow_but_last

pytest.importorskip("torch")


def everyone(launch, worker, n, hosts=1, **options):
    reports = launch(worker, n, hosts, **options).must_succeed().reports()
    assert set(reports) == set(range(n))
    return reports


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (7, 3), (4, 2), (3, 2)))
def test_every_collective_type_and_size(launch, n, hosts):
    assert everyone(launch, "torch_collectives.py", n, hosts)[0]["checked"] > 800


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((3, 1), (4, 1), (5, 3), (4, 2)))
def test_process_sets(launch, n, hosts):
    everyone(launch, "process_sets.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (3, 1), (3, 3), (4, 2), (3, 2)))
def test_join(launch, n, hosts):
    assert everyone(launch, "joining.py", n, hosts)[0]["last"] == n - 1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 3)))
def test_join_with_operations_of_ones_own_outstanding(launch, n, hosts):
    everyone(launch, "join_with_outstanding.py", n, hosts, arguments=["25"], env={"COLLECTIVE_TIMEOUT": "30"})


@pytest.mark.slow
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (2, 1), (3, 1), (4, 2), (3, 2)))
def test_horovods_semantics_where_they_are_chosen(launch, n, hosts):
    everyone(launch, "horovod_semantics.py", n, hosts)


def test_ranks_with_different_semantics_are_told_so(launch):
    reports = everyone(launch, "horovod_semantics.py", 3, arguments=["one"])
    for entry in reports.values():
        assert (entry["kind"], entry["ranks"]) == ("invalid", [1])
        assert "COLLECTIVE_SEMANTICS must be the same on all ranks, and is horovod on rank 0, 2; engine on rank 1" in entry["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "hosts", "semantics", "least"), slow_but_last((2, 1, "engine", 2000), (3, 2, "engine", 2000), (3, 2, "horovod", 1000))
)
def test_reductions_with_factors_while_a_rank_has_joined(launch, n, hosts, semantics, least):
    reports = everyone(launch, "joined_reductions.py", n, hosts, env={"COLLECTIVE_SEMANTICS": semantics})
    assert all(reports[rank]["checked"] > least for rank in range(n - 1))


@pytest.mark.parametrize(("n", "hosts", "short"), slow_but_last((1, 1, []), (3, 1, []), (4, 2, [2, 3])))
def test_uneven_data_is_reported_and_weighed_by_sample(launch, n, hosts, short):
    reports = everyone(launch, "uneven.py", n, hosts)
    assert all(not entry["warnings"] for rank, entry in reports.items() if rank > 0), "one rank speaks for all"
    assert len(reports[0]["warnings"]) == (1 if short else 0)
    for text in reports[0]["warnings"]:
        assert "2 steps" in text
        assert [rank for rank in range(n) if f"rank {rank} has 1" in text] == short


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (2, 1), (3, 1), (4, 2), (3, 2)))
def test_options_of_the_optimizer_and_what_goes_with_it(launch, n, hosts):
    everyone(launch, "optimizer_options.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((1, 1), (3, 1), (4, 2), (3, 2)))
def test_details_of_the_interface(launch, n, hosts):
    everyone(launch, "horovod_details.py", n, hosts)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", slow_but_last(1, 2))
def test_process_sets_from_communicators(launch, hosts):
    everyone(launch, "communicators.py", 4, hosts)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (4, 2), (3, 2)))
def test_optimizers_beside_each_other_and_after_errors(launch, n, hosts):
    everyone(launch, "several_optimizers.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (4, 2), (2, 2)))
def test_what_a_program_does_to_gradients_and_parameters_between_steps(launch, n, hosts):
    everyone(launch, "changed_gradients.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), slow_but_last((2, 1), (3, 1), (3, 3), (4, 2), (3, 2)))
def test_wrong_use_is_reported_on_every_rank_and_survived(launch, n, hosts):
    reports = everyone(launch, "wrong_use.py", n, hosts)
    assert {entry["cases"] for entry in reports.values()} == {reports[0]["cases"]}
    assert reports[0]["cases"] == 115


def test_the_allreduce_family_has_one_signature_and_pythons_own_errors():
    import inspect

    import collective_core.torch as hvd

    import collective_core

    options = {"average": None, "name": None, "op": None, "prescale_factor": 1.0, "postscale_factor": 1.0, "process_set": None}
    for form in ("allreduce_", "allreduce_async", "allreduce_async_"):
        for function in (getattr(hvd, form), getattr(hvd, f"grouped_{form}")):
            first, *others = inspect.signature(function).parameters.values()
            assert first.name == ("tensors" if function.__name__.startswith("grouped") else "tensor")
            assert {each.name: each.default for each in others} == options
            assert "prescale_factor: Multiplies each input." in function.__doc__
    assert list(inspect.signature(hvd.reducescatter).parameters)[1:4] == ["name", "compression", "op"]
    assert inspect.signature(collective_core.allreduce).parameters["op"].default == "Average"
    for function in (hvd.allreduce, hvd.allreduce_, hvd.grouped_reducescatter_async, collective_core.reducescatter):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'averaged'"):
            function([], averaged=True)
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) missing 1 required positional argument"):
            function()
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        hvd.allreduce_async(None, average=True, op=hvd.Sum)
