"""What programs written for Horovod do: collectives, process sets, uneven data, wrong use, options of the optimizer."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


def everyone(launch, worker, n, hosts=1, **options):
    reports = launch(worker, n, hosts, **options).must_succeed().reports()
    assert set(reports) == set(range(n))
    return reports


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (4, 2), (7, 3)])
def test_every_collective_type_and_size(launch, n, hosts):
    assert everyone(launch, "torch_collectives.py", n, hosts)[0]["checked"] > 800


@pytest.mark.parametrize(("n", "hosts"), [(3, 1), (4, 1), (4, 2), (5, 3)])
def test_process_sets(launch, n, hosts):
    everyone(launch, "process_sets.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (3, 1), (4, 2), (3, 3)])
def test_join(launch, n, hosts):
    assert everyone(launch, "joining.py", n, hosts)[0]["last"] == n - 1


@pytest.mark.parametrize(("n", "hosts", "short"), [(1, 1, []), (3, 1, []), (4, 2, [2, 3])])
def test_uneven_data_is_reported_and_weighed_by_sample(launch, n, hosts, short):
    reports = everyone(launch, "uneven.py", n, hosts)
    assert all(not entry["warnings"] for rank, entry in reports.items() if rank > 0), "one rank speaks for all"
    assert len(reports[0]["warnings"]) == (1 if short else 0)
    for text in reports[0]["warnings"]:
        assert "2 steps" in text
        assert [rank for rank in range(n) if f"rank {rank} has 1" in text] == short


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_options_of_the_optimizer_and_what_goes_with_it(launch, n, hosts):
    everyone(launch, "optimizer_options.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_details_of_the_interface(launch, n, hosts):
    everyone(launch, "horovod_details.py", n, hosts)


@pytest.mark.parametrize("hosts", [1, 2])
def test_process_sets_from_communicators(launch, hosts):
    everyone(launch, "communicators.py", 4, hosts)


@pytest.mark.parametrize(("n", "hosts"), [(2, 1), (4, 2)])
def test_optimizers_beside_each_other_and_after_errors(launch, n, hosts):
    everyone(launch, "several_optimizers.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), [(2, 1), (4, 2)])
def test_what_a_program_does_to_gradients_and_parameters_between_steps(launch, n, hosts):
    everyone(launch, "changed_gradients.py", n, hosts)


@pytest.mark.parametrize(("n", "hosts"), [(2, 1), (3, 1), (4, 2), (3, 3)])
def test_wrong_use_is_reported_on_every_rank_and_survived(launch, n, hosts):
    reports = everyone(launch, "wrong_use.py", n, hosts)
    assert {entry["cases"] for entry in reports.values()} == {reports[0]["cases"]}
    assert reports[0]["cases"] == 115
