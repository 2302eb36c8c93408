"""Autotune: what it decides from figures, that ranks agree, that it changes no bit, and that the next job knows what was chosen."""

from __future__ import annotations

import itertools
import json

import pytest
from collective_core.runtime import horovod_variables

autotune = pytest.importorskip("collective_core.extensions.autotune")
Cache, Tuner = autotune.Cache, autotune.Tuner
MB = 1 << 20
DEFAULT = 25 * MB
#: More than a tuning ever takes.
MANY = 1000


def tune(step_of, exposed_of, candidates=(MB, 4 * MB, 100 * MB)):
    """Plays a training whose steps and waits last as the functions of size and step number say."""
    tuner = Tuner(DEFAULT, candidates, list)
    now, waited, used = 0.0, 0.0, []
    for number in range(MANY):
        used.append(tuner.size)
        now += step_of(tuner.size, number)
        waited += exposed_of(tuner.size, number)
        tuner.step_done(now, waited)
    assert tuner.chosen is not None
    return tuner, used


def test_without_a_difference_the_default_stays():
    tuner, used = tune(lambda *_: 0.1, lambda *_: 0.02)
    assert tuner.chosen == DEFAULT
    assert "chosen: 25.00 MB (the default)" in tuner.report()
    assert set(used) == {DEFAULT, MB, 4 * MB, 100 * MB}
    assert set(used[-800:]) == {DEFAULT}


def test_what_is_better_twice_is_taken():
    tuner, _ = tune(lambda size, _: 0.09 if size == 4 * MB else 0.1, lambda size, _: 0.01 if size == 4 * MB else 0.02)
    assert tuner.chosen == tuner.size == 4 * MB
    assert "4.00 MB against the default: 90.00 against 100.00 ms a step" in tuner.report()


def test_less_than_the_margin_is_not_worth_a_change():
    saved = autotune.MARGIN * 0.1 * 0.9
    tuner, _ = tune(lambda *_: 0.1, lambda size, _: 0.02 - (saved if size == MB else 0.0))
    assert tuner.chosen == DEFAULT


def test_waiting_less_in_longer_steps_is_no_gain():
    tuner, _ = tune(lambda size, _: 0.101 if size == MB else 0.1, lambda size, _: 0.0 if size == MB else 0.02)
    assert tuner.chosen == DEFAULT


def test_luck_does_not_come_twice():
    first = autotune.SETTLE + 4 * autotune.TURNS * (autotune.STEPS + autotune.WARM_UP)

    def exposed(size, number):
        return 0.0 if size == MB and number < first else 0.02

    tuner, _ = tune(lambda size, _: 0.099 if size == MB else 0.1, exposed)
    assert tuner.finalist == MB
    assert tuner.chosen == DEFAULT


def test_a_hopeless_size_has_one_turn():
    _, used = tune(lambda size, _: 0.5 if size == MB else 0.1, lambda *_: 0.02)
    assert used.count(MB) == autotune.STEPS + autotune.WARM_UP


def test_the_slow_first_steps_of_a_program_do_not_count_against_the_default():
    tuner, _ = tune(lambda _, number: 5.0 if number < 3 else 0.1, lambda _, number: 1.0 if number < 3 else 0.02)
    assert tuner.chosen == DEFAULT
    assert tuner.turns[DEFAULT][0].step == pytest.approx(0.1)


def test_the_cache_survives_what_is_wrong_with_it(tmp_path):
    cache = Cache(str(tmp_path / "new" / "autotune.json"))
    assert cache.read("job") is None
    cache.write("job", 4 * MB)
    cache.write("other job", MB)
    assert (cache.read("job"), cache.read("other job")) == (4 * MB, MB)
    for content in ("", "[1]", '{"job": "large"}', '{"job": -1}', "no json"):
        cache.path.write_text(content)
        assert cache.read("job") is None
    cache.write("job", MB)
    assert cache.read("job") == MB


def test_horovods_variable_means_the_same():
    ours, notes = horovod_variables.translate({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv"})
    assert ours == {"COLLECTIVE_AUTOTUNE": "1"}
    assert [note.split(":")[0] for note in notes] == ["HOROVOD_AUTOTUNE_LOG has no effect"]


@pytest.mark.slow
def test_a_training_is_tuned_without_changing_a_bit_and_the_next_one_knows(launch, tmp_path):
    pytest.importorskip("torch")
    cache = tmp_path / "autotune.json"
    tuned = {"HOROVOD_AUTOTUNE": "1", "COLLECTIVE_AUTOTUNE_CACHE": str(cache)}
    plain = launch("autotuned.py", 2, arguments=["90"]).must_succeed().reports()
    first_run = launch("autotuned.py", 2, arguments=["90"], env=tuned).must_succeed()
    first = first_run.reports()
    assert plain[0]["buckets"] == [1]
    assert len(first[0]["buckets"]) > 1, "no other size was tried"
    assert all(entry["is_final"] for entry in first.values())
    assert len({entry["size"] for entry in first.values()}) == 1, "the ranks have chosen differently"
    assert len({entry["digest"] for entry in itertools.chain(plain.values(), first.values())}) == 1
    assert first_run.stderr.count("autotune: bucket size") == 1
    assert first_run.stderr.count("chosen: ") == 1
    assert list(json.loads(cache.read_text()).values()) == [first[0]["size"]]

    second_run = launch("autotuned.py", 2, arguments=["10"], env=tuned).must_succeed()
    second = second_run.reports()
    assert second[0]["size"] == first[0]["size"]
    assert len(second[0]["buckets"]) == 1, "it was tuned again"
    assert "as chosen by an earlier job" in second_run.stderr
