"""Does a training run that was stopped anywhere go on with the bits of one that was not?"""

from __future__ import annotations

import io
import os
import signal
import threading

import numpy as np
import pytest
import torch
from ranks import Crew
from training import garments

from pyringar.errors import ArgumentError, PeerLostError, RingarError
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import TrainConfig, Trainer, checkpoint, train
from pyringar.train import trainer as trainer_module
from pyringar.train.checkpoint import Checkpoint
from pyringar.train.group import Processes

LENET = {"batch_size": 20, "epochs": 3}  # 75 images: 4 steps an epoch, the last one smaller
RESNET = {"model": "resnet18", "width": 4, "batch_size": 20, "epochs": 2}
FILE = "checkpoint.bin"


@pytest.fixture(scope="module")
def images():
    return garments(75, 30)


@pytest.fixture(scope="module")
def pool():
    made = Crew(2)
    yield made
    made.close()


def go(images, options, stop_after=None, on_epoch=None, group=None, **folders):
    """Train; returns the result, or None if it was stopped after so many steps."""
    steps = []

    def count():
        steps.append(1)
        if len(steps) == stop_after:
            signal.raise_signal(signal.SIGINT)

    with Trainer(TrainConfig(**options), images, group=group, **folders) as trainer:
        if stop_after is None:
            return trainer.run(on_step=count, on_epoch=on_epoch)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(on_step=count, on_epoch=on_epoch)
        assert trainer.step >= stop_after
    return None


def assert_same(found, wanted):
    assert found.losses == wanted.losses
    assert found.curve == wanted.curve
    assert list(found.state) == list(wanted.state)
    check_replicas_equal([list(found.state.values()), list(wanted.state.values())])
    assert [epoch.epoch for epoch in found.epochs] == list(range(1, len(wanted.epochs) + 1))


MORE_RUNS = [
    ({**LENET, "ranks": 1}, [1]),
    ({**LENET, "ranks": 2, "weights": (3, 1), "lr_schedule": "constant"}, [6]),
    ({**LENET, "ranks": 3, "dtype": "float64", "momentum": 0.9}, [3]),
    ({**RESNET, "ranks": 1}, [5]),
    ({**RESNET, "ranks": 3, "batch_size": 37, "allreduce": "ring", "bucket_cap_mb": 0.02}, [2]),
]


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({**LENET, "ranks": 2}, [4, 1, 2]),  # after an epoch's last step, and twice more
        ({**LENET, "ranks": 3, "allreduce": "ring", "bucket_cap_mb": 0.1}, [5, 3]),
        ({**LENET, "ranks": 2, "batch_size": 1000}, [2]),  # one step an epoch
        pytest.param({**RESNET, "ranks": 2, "batchnorm": "sync"}, [3], marks=pytest.mark.slow),
        *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE_RUNS),
    ],
    ids=lambda value: "-".join(map(str, value.values() if isinstance(value, dict) else value)),
)
def test_resume_is_bit_identical(images, tmp_path, options, stops):
    whole = go(images, options)
    here = tmp_path / "run"
    go(images, options, stops[0], save=here)
    for stop in stops[1:]:
        go(images, options, stop, resume=here)
    assert_same(go(images, options, resume=here), whole)
    assert [path.name for path in here.iterdir()] == [FILE], "nothing else is left there"


def test_resume_restores_local_statistics(images, tmp_path):
    go(images, {**RESNET, "ranks": 2}, 3, save=tmp_path)
    found = Checkpoint.decode((tmp_path / FILE).read_bytes(), tmp_path)
    first, second = (tensors[1:] for tensors in found.rank_tensors)
    assert not all(map(torch.equal, first, second)), "or this test would show nothing"
    with Trainer(TrainConfig(**RESNET, ranks=2), images, resume=tmp_path) as trainer:
        for mine, saved in zip(trainer.model.buffers(), (first, second), strict=True):
            check_replicas_equal([mine, saved])


def test_resume_restores_the_buckets(images, tmp_path):
    """A ring adds in an order that depends on where in its bucket a gradient lies."""
    config = TrainConfig(**RESNET, ranks=3, allreduce="ring")
    with Trainer(config, images, save=tmp_path) as trainer:
        before = trainer.model.bucketer.buckets
        trainer.run()
        learned = trainer.model.bucketer.buckets
    assert learned != before, "or this test would show nothing"
    with Trainer(config, images, resume=tmp_path) as trainer:
        assert trainer.model.bucketer.buckets == learned


def test_epoch_is_saved_before_callback(images, tmp_path):
    def look(result):
        found = Checkpoint.decode((tmp_path / FILE).read_bytes(), tmp_path)
        assert len(found.epochs) == result.epoch
        assert found.epoch_steps == 0

    told = []
    result = go(images, LENET, on_epoch=look, save=tmp_path)
    again = go(images, LENET, on_epoch=told.append, resume=tmp_path)
    assert_same(again, result)
    assert told == list(result.epochs), "a finished run tells its epochs, and does nothing"


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_more_epochs_after_the_last(images, tmp_path, schedule):
    options = {**LENET, "lr_schedule": schedule}
    short = go(images, {**options, "epochs": 1}, save=tmp_path)
    longer = go(images, options, resume=tmp_path)
    assert longer.epochs[:1] == short.epochs
    assert len(longer.epochs) == 3
    if schedule == "constant":
        assert_same(longer, go(images, options))
    with pytest.raises(ArgumentError, match=r"epochs is 2, but .* of a run of 3"):
        go(images, {**options, "epochs": 2}, resume=tmp_path)


def test_save_elsewhere_keeps_old_checkpoint(images, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    go(images, LENET, 5, save=first)
    before = (first / FILE).read_bytes()
    result = go(images, LENET, save=second, resume=first)
    assert (first / FILE).read_bytes() == before
    assert_same(go(images, LENET, resume=second), result)
    assert_same(go(images, LENET, save=first, resume=first), result)


def test_train_takes_both(images, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: images)
    first = train(2, 20, 0.1, epochs=1, save=tmp_path)
    again = train(2, 20, 0.1, epochs=1, resume=str(tmp_path))
    assert_same(again, first)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "resnet18"}, "model is 'resnet18', but the checkpoint has 'lenet'"),
        ({"ranks": 3}, "ranks is 3, but the checkpoint has 2"),
        ({"batch_size": 10}, "batch_size is 10, but the checkpoint has 20"),
        ({"dtype": "float64"}, "dtype is 'float64', but the checkpoint has 'float32'"),
        ({"lr": 0.2}, "lr is 0.2, but the checkpoint has 0.1"),
        ({"seed": 1}, "seed is 1, but the checkpoint has 0"),
        ({"init": "book"}, "init is 'book', but the checkpoint has 'he'"),
        ({"weights": (2, 1)}, "weights is (2.0, 1.0), but the checkpoint has None"),
        ({"lr_schedule": "constant"}, "lr_schedule is 'constant', but"),
        ({"bucket_cap_mb": 1}, "bucket_cap_mb is 1.0, but"),
        (
            {"allreduce": "ring"},
            "allreduce is 'ring', which adds in ring order here, but the run of the checkpoint "
            "added in rank order",
        ),
    ],
)
def test_resume_with_other_options_raises(images, tmp_path, changed, words):
    go(images, {**LENET, "ranks": 2}, 1, save=tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ArgumentError) as caught:
        go(images, {**LENET, "ranks": 2, **changed}, resume=tmp_path)
    assert words.format(tmp_path) in str(caught.value)
    assert (tmp_path / FILE).read_bytes() == before


def test_what_changes_no_bit_may_change(images, tmp_path):
    whole = go(images, LENET)
    go(images, LENET, 6, save=tmp_path)
    others = {"allreduce": "direct", "data_dir": "/nowhere"}
    assert_same(go(images, {**LENET, **others}, resume=tmp_path), whole)


def test_other_images_are_refused(images, tmp_path):
    go(images, LENET, 1, save=tmp_path)
    with pytest.raises(ArgumentError, match=r"dataset is garments, 80 .* on other images: .* 75"):
        go(garments(80, 30), LENET, resume=tmp_path)
    images.test_labels[0] += 1
    try:
        with pytest.raises(ArgumentError, match="other images"):
            go(images, LENET, resume=tmp_path)
    finally:
        images.test_labels[0] -= 1


def damaged(content):
    """Everything a file can be instead, by name."""
    payload = io.BytesIO()
    torch.save({"epochs": 1}, payload)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    return {
        "empty": (b"", "is no checkpoint of this version of pyringar"),
        "foreign": (payload.getvalue(), "is no checkpoint of this version of pyringar"),
        "the kind alone": (b"pyringar checkpoint ", "is no checkpoint of this version"),
        "the first line alone": (b"pyringar checkpoint 2\n", "is damaged"),
        "cut short": (content[:-1], "is damaged"),
        "cut in the digest": (content[:30], "is damaged"),
        "longer": (content + b"\0", "is damaged"),
        "one bit": (bytes(flipped), "is damaged"),
        "of tomorrow": (content.replace(b" 2\n", b" 3\n", 1), "is no checkpoint of this version"),
    }


@pytest.mark.parametrize("how", damaged(bytes(100)))
def test_damaged_checkpoint_raises(images, tmp_path, how):
    go(images, LENET, 1, save=tmp_path)
    content, words = damaged((tmp_path / FILE).read_bytes())[how]
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ArgumentError) as caught:
        go(images, LENET, resume=tmp_path)
    assert f"resume is '{tmp_path}', but its checkpoint.bin {words}" in str(caught.value)
    assert (tmp_path / FILE).read_bytes() == content


def test_unusable_folder_raises_before_training(images, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "batches", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "odd" / FILE).mkdir(parents=True)
    for folders, words in [
        ({"save": tmp_path / "no" / "where"}, "where', which cannot be written: No such file"),
        ({"save": tmp_path / "file"}, "file', which cannot be written: File exists"),
        ({"save": "/proc"}, "save is '/proc', which cannot be written"),
        ({"save": "a\0b"}, "cannot be written"),
        ({"save": tmp_path / ("a" * 300)}, "cannot be written: File name too long"),
        ({"save": ""}, "save is '', expected the path of a folder"),
        ({"resume": ""}, "resume is '', expected the path of a folder"),
        ({"resume": tmp_path}, f"resume is '{tmp_path}', expected a folder that save has written"),
        ({"resume": tmp_path / "file"}, "expected a folder that save has written"),
        ({"resume": tmp_path / "odd"}, "its checkpoint.bin cannot be read: Is a directory"),
    ]:
        with pytest.raises(ArgumentError, match=r"save|resume") as caught:
            go(images, LENET, **folders)
        assert words in str(caught.value)


def test_save_refuses_existing_checkpoint(images, tmp_path):
    go(images, LENET, 1, save=tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(
        ArgumentError, match=rf"has a checkpoint: go on from it with resume='{tmp_path}'"
    ):
        go(images, LENET, save=tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_removed_folder_raises(images, tmp_path):
    folder, told = tmp_path / "run", []
    with Trainer(TrainConfig(**LENET), images, save=folder) as trainer:
        folder.rmdir()
        with pytest.raises(RingarError, match=r"checkpoint\.bin' cannot be written: No such file"):
            trainer.run(on_epoch=told.append)
    assert len(told) == 1


def test_a_trainer_runs_once(images, tmp_path):
    def stop():
        raise KeyboardInterrupt

    with Trainer(TrainConfig(**LENET), images, save=tmp_path) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.run(on_step=stop)
        with pytest.raises(RingarError, match="run was called before: make another Trainer"):
            trainer.run()
    assert trainer.step == 1
    with Trainer(TrainConfig(**LENET), images) as trainer:
        trainer.run()
        with pytest.raises(RingarError, match="run was called before"):
            trainer.run()  # at the learning rates after the last


def test_a_constant_rate_goes_on(images):
    options = {**LENET, "lr_schedule": "constant"}
    with Trainer(TrainConfig(**{**options, "epochs": 2}), images) as trainer:
        whole = trainer.run()
    with Trainer(TrainConfig(**{**options, "epochs": 1}), images) as trainer:
        halves = [trainer.run() for _ in range(2)]
    assert [half.losses[0] for half in halves] == whole.losses
    check_replicas_equal([halves[1].params, whole.params])


def test_numbers_of_numpy_are_read_back(images, tmp_path):
    options = {**LENET, "lr": np.float64(0.1), "bucket_cap_mb": np.float64(1), "ranks": 2}
    options["weights"] = np.array([3.0, 1.0])
    go(images, options, 1, save=tmp_path)
    go(images, {**options, "lr": 0.1, "bucket_cap_mb": 1, "weights": (3, 1)}, resume=tmp_path)


def test_other_threads_or_another_torch_are_told(images, tmp_path, caplog, monkeypatch):
    options = LENET
    go(images, options, 1, save=tmp_path)
    caplog.clear()
    go(images, options, 1, resume=tmp_path)
    assert len(caplog.records) == 1, "that it was stopped"
    caplog.clear()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 93)
    monkeypatch.setattr(torch, "__version__", "1.0")
    go(images, options, resume=tmp_path)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "torch: 1.0 here, 2." in told
    assert (
        f"torch threads per rank: 93 here, {threads} where the checkpoint in '{tmp_path}'" in told
    )


def test_home_folder_is_expanded(images, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    go(images, LENET, 1, save="~/run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_partial_file_is_replaced(images, tmp_path):
    go(images, LENET, 1, save=tmp_path)
    (tmp_path / f".{FILE}.new").write_bytes(b"half" * 10**6)
    go(images, LENET, 1, resume=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_failed_write_keeps_last_checkpoint(images, tmp_path, monkeypatch):
    real, told = os.fsync, []

    def full(descriptor):
        if len(told) == 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(RingarError, match=r"checkpoint\.bin' cannot be written: No space left"):
        go(images, LENET, on_epoch=told.append, save=tmp_path)
    assert len(told) == 2, "the epoch that could not be saved is told"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert len(Checkpoint.decode((tmp_path / FILE).read_bytes(), tmp_path).epochs) == 1


# -- signals ---------------------------------------------------------------------------------------


def test_second_signal_acts_at_once(images, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with (
        Trainer(TrainConfig(**LENET), images, save=tmp_path) as trainer,
        pytest.raises(KeyboardInterrupt),
    ):
        trainer.run(on_step=twice)
    assert not list(tmp_path.iterdir()), "there was no time to save"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_sigterm_ends_it_with_its_status(images, tmp_path):
    with (
        Trainer(TrainConfig(**LENET), images, save=tmp_path) as trainer,
        pytest.raises(SystemExit) as caught,
    ):
        trainer.run(on_step=lambda: signal.raise_signal(signal.SIGTERM))
    assert caught.value.code == 143
    assert (tmp_path / FILE).exists()


def test_handlers_of_the_program_are_left_alone(images, tmp_path, monkeypatch):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with Trainer(TrainConfig(ranks=2, batch_size=80, epochs=1), images, save=tmp_path) as run:
            run.run(on_step=lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_run_in_thread_saves_epochs(images, tmp_path):
    thread = threading.Thread(target=go, args=(images, LENET), kwargs={"save": tmp_path})
    thread.start()
    thread.join()
    assert len(Checkpoint.decode((tmp_path / FILE).read_bytes(), tmp_path).epochs) == 3


# -- processes -------------------------------------------------------------------------------------


def go_as_rank(rank, world_size, store, options, stop_after, folders):
    torch.set_num_threads(1)
    group = Processes(TrainConfig(ranks=world_size, **options), store, rank, world_size)
    # A signal to one of them stops all.
    stop_after = stop_after if rank == 0 else (stop_after and 10**9)
    if stop_after == 10**9:
        with (
            Trainer(TrainConfig(ranks=2, **options), garments(75, 30), group=group, **folders) as t,
            pytest.raises(KeyboardInterrupt),
        ):
            t.run()
        return None
    return go(
        garments(75, 30), {**options, "ranks": 2}, stop_after=stop_after, group=group, **folders
    )


@pytest.mark.parametrize("options", [LENET, {**RESNET, "weights": (3, 1)}], ids=["lenet", "resnet"])
def test_from_one_process_to_many_and_back(pool, images, tmp_path, options):
    whole = go(images, {**options, "ranks": 2})
    there, back = tmp_path / "there", tmp_path / "back"
    go(images, {**options, "ranks": 2}, 3, save=there)
    for result in pool.check(go_as_rank, options, None, {"resume": there}):
        assert_same(result, whole)
    pool.check(go_as_rank, options, 5, {"save": back})
    assert_same(go(images, {**options, "ranks": 2}, resume=back), whole)


def refused_as_rank(rank, world_size, store, folders):
    group = Processes(TrainConfig(ranks=world_size, **LENET), store, rank, world_size)
    with pytest.raises(RingarError) as caught:
        Trainer(TrainConfig(ranks=world_size, **LENET), garments(75, 30), group=group, **folders)
    group.close()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["save", "resume"])
def test_unusable_folder_raises_on_all_ranks(pool, tmp_path, name):
    first, second = pool.check(refused_as_rank, {name: tmp_path / "no" / "where"})
    assert first[0] is ArgumentError
    assert f"{name} is '{tmp_path}/no/where'" in first[1]
    assert second[0] is PeerLostError
