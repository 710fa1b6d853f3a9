"""Sweeps: each run once, whatever stops, dies or is added."""

import ast
import errno
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from dpivon import compare, data, ledger, mechanism, sweep, train
from dpivon import grid as grids
from dpivon.grid import read

GRID = """
[base]
epochs = 1
seed = 0

[[grid]]
method = ["dp-sgd", "dp-adam"]
noise_multiplier = [1, 4]
"""
DIVERGES = """
[[grid]]
name = "too fast"
method = "sgd"
lr = 1e12
weight_decay = 1e9
epochs = 5
"""


@pytest.fixture
def grid(tmp_path):
    """A sweep over the grid file `grid.toml`, which tests may write again."""
    (tmp_path / "grid.toml").write_text(GRID)
    return sweep.Sweep(tmp_path / "grid.toml", tmp_path / "runs.jsonl")


@pytest.fixture
def serial(monkeypatch):
    """One worker, this process, without dask; the list of all runs that it made."""
    made = []

    @contextmanager
    def engine(*_):
        yield lambda jobs: (made.append(args[0]) or run(*args) for run, args, _ in jobs), 1

    monkeypatch.setattr(sweep, "engine", engine)
    return made


def go(a_sweep, lines=None):
    report = (lambda line: None) if lines is None else lines.append
    return a_sweep.run(read(a_sweep.grid), report)


# ---- each run once


def test_settings_have_one_key_whether_they_come_from_a_grid_the_command_line_or_python(grid):
    configs = read(grid.grid)
    assert sweep.key(configs[0]) == ledger.key(asdict(configs[0]), train.RECIPE)
    assert sweep.key(replace(configs[0], epochs=1)) == sweep.key(configs[0])
    default = train.Config(method="dp-sgd", seed=0, noise_multiplier=1)
    assert sweep.key(train.resolve(default)) == sweep.key(train.resolve(replace(default, epochs=30.0)))
    assert sweep.key(configs[0]) != sweep.key(configs[0], train.RECIPE + 1)


def test_a_grid_with_a_mistake_runs_nothing(grid, serial):
    grid.grid.write_text(GRID + '[[grid]]\nmethod = "dp-adm"\n')
    with pytest.raises(ValueError, match=r"nothing was:\n.*unknown method 'dp-adm'"):
        grid()
    assert not serial
    assert not grid.ledger.exists()


def test_a_sweep_goes_on_where_it_was_stopped_and_a_changed_grid_adds_what_is_new(grid, serial, monkeypatch):
    real = ledger.append

    def full(path, record):
        if len(ledger.read(path)) == 2:
            raise OSError("No space left on device")
        real(path, record)

    monkeypatch.setattr(ledger, "append", full)
    with pytest.raises(OSError, match="No space"):
        go(grid)
    monkeypatch.setattr(ledger, "append", real)
    assert len(ledger.read(grid.ledger)) == 2
    lines = []
    assert go(grid, lines) == 0
    assert lines[0] == f"4 runs, 2 of them in {grid.ledger}, 2 to run"
    assert len(serial) == 3 + 2
    grid.grid.write_text(GRID.replace("[1, 4]", "[4, 8]"))
    go(grid)
    assert [(c.method, c.noise_multiplier) for c in serial[5:]] == [("dp-sgd", 8.0), ("dp-adam", 8.0)]
    go(grid)
    assert len(serial) == 7
    records = ledger.read(grid.ledger)
    assert len({r["key"] for r in records}) == len(records) == 6
    assert all(r["status"] == "finished" for r in records)


def test_a_raised_recipe_invalidates(grid, serial, monkeypatch):
    go(grid)
    raised = train.RECIPE + 1
    for module in (train, grids):
        monkeypatch.setattr(module, "RECIPE", raised)
    go(grid)
    assert len(serial) == 8
    go(grid)
    assert len(serial) == 8


def test_a_failed_run_is_recorded_and_does_not_stop_the_others(grid, serial, capsys):
    grid.grid.write_text(GRID.replace("[[grid]]", DIVERGES + "[[grid]]"))
    with pytest.raises(SystemExit) as end:
        grid()
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "sgd: FAILED, FloatingPointError: " in out
    assert "1 failed, see their field error" in out
    records = ledger.read(grid.ledger)
    assert [r["status"] for r in records] == ["failed"] + 4 * ["finished"]
    assert "lower the learning rate" in records[0]["error"]
    assert records[0]["results"] == {}
    grid()  # the failed one counts as done, until it is asked for
    assert len(serial) == 5
    with pytest.raises(SystemExit):
        replace(grid, retry_failed=True)()
    assert [c.method for c in serial[5:]] == ["sgd"]
    assert [r["status"] for r in sweep.records(grid.ledger).values()].count("failed") == 1
    # Readers of finished lines do not see it.
    c = compare.Compare(ledger=grid.ledger, methods=("dp-sgd",), epsilon=(8.0,), seeds=1, epochs=1.0)
    assert [r["status"] for r in c.run(lambda line: None)] == ["finished"]


def test_a_failed_record_holds_no_message_that_may_tell_of_the_batch(grid, serial, monkeypatch, capsys):
    """An allocator's message tells how much it was asked for, and so the size of the batch, which is private."""

    def unlucky(n, batch_size, steps, generator=None):
        index = next(real(n, batch_size, 1, generator))
        torch.empty(len(index) * 10**13)
        yield index

    real = mechanism.poisson_batches
    monkeypatch.setattr(mechanism, "poisson_batches", unlucky)
    record = sweep.job(read(grid.grid)[0], None)
    assert record["status"] == "failed"
    assert record["error"].startswith("RuntimeError in loop.py, line ")
    assert not re.search(r"\d{4}", record["error"])
    shown = capsys.readouterr().err
    assert shown.startswith("[diagnostic, not covered by epsilon: RuntimeError: ")
    assert re.search(r"\d{9}", shown)
    ledger.validate(record)


def test_a_finished_line_counts_more_than_a_failed_one(grid, serial):
    (config, *_) = read(grid.grid)
    ledger.append(grid.ledger, sweep.failure(config, "OSError: the disk", 1.0))
    assert not sweep.is_done(grid.ledger, sweep.key(config), retry_failed=True)
    assert sweep.is_done(grid.ledger, sweep.key(config), retry_failed=False)
    go(replace(grid, retry_failed=True))
    ledger.append(grid.ledger, sweep.failure(config, "OSError: the disk", 1.0))
    assert sweep.records(grid.ledger)[sweep.key(config)]["status"] == "finished"
    assert sweep.is_done(grid.ledger, sweep.key(config), retry_failed=True)


def test_missing_data_stop_the_sweep_and_are_no_failed_run(grid, serial, tmp_path):
    with pytest.raises(data.DataError, match="none does not exist"):
        go(replace(grid, root=tmp_path / "none"))
    assert not grid.ledger.exists()


def test_a_worker_of_another_recipe_is_noticed(grid, serial, monkeypatch):
    real = train.run

    def older(config, **options):
        record = {**real(config, **options), "recipe": 1}
        return {**record, "key": ledger.key(record["config"], 1)}

    monkeypatch.setattr(train, "run", older)
    with pytest.raises(ValueError, match="ran recipe 1 where this is recipe"):
        go(grid)
    assert not grid.ledger.exists()


def test_time_that_may_not_be_recorded_is_left_out(grid, serial, capsys):
    grid.grid.write_text('[[grid]]\nmethod = ["dp-sgd", "sgd"]\nepochs = 1\n')
    private, public = configs = read(grid.grid)
    assert [sweep.failure(config, "", 1.0)["seconds"] for config in configs] == [None, 1.0]
    assert go(grid, lines := []) == 0
    assert re.search(r"dp-sgd: accuracy .* ECE 0\.\d{3}(; about|$)", lines[1])
    assert re.search(r" sgd: accuracy .* ECE 0\.\d{3}  \d+ s$", lines[2])
    known = ledger.read(grid.ledger)
    assert sweep.expect(private, known[:1]) is None  # nothing is known of such runs' time
    assert sweep.expect(public, known) > 0
    replace(grid, dry_run=True)()
    assert capsys.readouterr().out.endswith("2 runs, 0 to run, for about 0 s on 2 workers\n")


# ---- two sweeps


def sweep_slowly(a_sweep, start):
    """In a process of its own: a sweep that begins when all are ready, and takes its time."""

    @contextmanager
    def engine(*_):
        yield lambda jobs: (time.sleep(0.05) or run(*args) for run, args, _ in jobs), 1

    sweep.engine = engine
    start.wait()
    go(a_sweep)


def test_two_sweeps_share_a_ledger_and_make_each_run_once(grid):
    other = replace(grid, grid=grid.grid.with_name("other.toml"))
    other.grid.write_text(GRID.replace("[1, 4]", "[2, 1, 4]"))
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    processes = [context.Process(target=sweep_slowly, args=(one, start)) for one in (grid, other, other)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    records = ledger.read(grid.ledger)
    assert len({r["key"] for r in records}) == len(records) == 6


def claim_and_wait(path, name, ready):
    with sweep.claims(path) as claim:
        assert claim(name)
        ready.set()
        time.sleep(60)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refused)
    with (
        sweep.claims(tmp_path / "runs.jsonl.claims") as claim,
        pytest.raises(OSError, match=r"cannot be locked .*No locks available.*--scheduler"),
    ):
        claim("0123456789abcdef")


def test_a_resumed_run_counts_whole(grid):
    config = read(grid.grid)[0]
    record = {**sweep.failure(config, "", 60.0), "status": "finished", "cost": {"predict_seconds": 2.0}}
    assert sweep.took({**record, "results": {"steps": 100}}) == 62.0
    assert sweep.took({**record, "results": {"steps": 100, "resumed_at": 40}}) == pytest.approx(102.0)


def test_a_claim_lasts_as_long_as_its_sweep(tmp_path, grid, serial):
    (first, *others) = (sweep.key(c) for c in read(grid.grid))
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=claim_and_wait, args=(f"{grid.ledger}.claims", first, ready))
    process.start()
    assert ready.wait(30)
    lines = []
    go(grid, lines)
    assert [sweep.key(c) for c in serial] == others
    assert lines[-1].startswith("1 more were made, or are being made, by another sweep")
    process.kill()
    process.join()
    go(grid)
    assert sweep.key(serial[-1]) == first


# ---- what it says


def test_a_dry_run_lists_what_there_is_and_how_long_the_rest_takes(grid, serial, capsys, monkeypatch):
    configs = read(grid.grid)
    replace(grid, dry_run=True)()
    out = capsys.readouterr().out
    assert f"{sweep.key(configs[0])}  dp-sgd noise_multiplier=1: to run\n" in out
    assert out.endswith("4 runs, 4 to run, for a time not known yet on 2 workers\n")
    assert not serial
    assert not grid.ledger.exists()
    record = train.run(configs[0])
    record["seconds"], record["cost"]["predict_seconds"] = 500.0, 100.0
    ledger.append(grid.ledger, record)
    replace(grid, dry_run=True)()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("noise_multiplier=1: finished")
    assert lines[1].endswith("noise_multiplier=4: to run, about 10.0 min")
    assert lines[-1] == "4 runs, 3 to run, for about 15.0 min on 2 workers"


def test_expected_seconds_come_from_runs_of_the_same_kind():
    config = train.resolve(train.Config(method="dp-sgd", epochs=10.0))

    def record(seconds, status="finished", **changes):
        return {"status": status, "seconds": seconds, "results": {}, "config": asdict(replace(config, **changes))}

    known = [record(1), record(2), record(30), record(1000, "failed")]
    assert sweep.expect(config, known) == 2
    other = [record(50, epochs=5.0), record(7, method="dp-adam"), record(1e4, model="lenet")]
    assert sweep.expect(config, [*known, *other]) == 2
    assert sweep.expect(config, other[:1]) == 100
    assert sweep.expect(config, other[2:]) is None
    assert [sweep.duration(s) for s in (5, 89, 90, 5399, 5400)] == ["5 s", "89 s", "1.5 min", "90.0 min", "1.5 h"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers must be >= 1, got 0"),
        ({"resources": ("GPU=1",)}, "give its --scheduler too"),
        ({"scheduler": "tcp://127.0.0.1:1", "resources": ("GPU",)}, "a name and a number, such as GPU=1, got 'GPU'"),
        ({"ledger": Path("none/runs.jsonl")}, "the folder .*none does not exist"),
    ],
)
def test_wrong_options_are_named(grid, changes, message):
    with pytest.raises((ValueError, OSError), match=message):
        replace(grid, **changes)()


def test_dpivon_is_imported_without_dask_and_a_sweep_says_what_is_missing(grid, monkeypatch):
    for file in Path(sweep.__file__).parent.glob("*.py"):
        for statement in ast.parse(file.read_text()).body:  # what is imported with the module, not inside a function
            names = [alias.name for alias in getattr(statement, "names", ())] + [getattr(statement, "module", "")]
            assert not {"dask", "distributed", "joblib"} & {str(name).split(".")[0] for name in names}, file.name
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(ValueError, match=r"needs dask and joblib.*pip install 'dpivon\[sweep\]'"):
        go(grid)


# ---- real clusters


@pytest.fixture(scope="module")
def cluster():
    """Two workers, processes of one thread each, of which one offers a GPU (or says so)."""
    import dask
    from dask.distributed import Nanny, Scheduler, SpecCluster

    for logger in ("distributed", "distributed.client"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    worker = {"cls": Nanny, "options": {"nthreads": 1, "dashboard": False}}
    with_gpu = {"cls": Nanny, "options": {**worker["options"], "resources": {"GPU": 1}}}
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "host": "127.0.0.1"}}
    with dask.config.set(sweep.LOCAL), SpecCluster({0: worker, 1: with_gpu}, scheduler, silence_logs=False) as both:
        yield both


def on_workers(cluster, function):
    """What `function` returns in each worker: on the one without and on the one with a GPU."""
    from dask.distributed import Client

    with Client(cluster) as client:
        found = client.run(function)
        workers = client.scheduler_info(n_workers=-1)["workers"]
    return [found[name] for name in sorted(found, key=lambda name: len(workers[name]["resources"]))]


def loads():
    return sweep.loaded.cache_info()[:2]


def test_each_run_takes_a_gpu_and_a_worker_loads_the_data_once(grid, cluster):
    s = replace(grid, scheduler=cluster.scheduler_address, resources=("GPU=1",))
    assert go(s) == 0
    assert len(sweep.records(grid.ledger)) == 4
    assert on_workers(cluster, loads) == [(0, 0), (3, 1)]
    assert all(r["hardware"]["threads"] == 1 for r in ledger.read(grid.ledger))


def kill_one(cluster, ledger_path, done):
    """Kill one worker, in the middle of its run, when the first run has ended."""
    while not (ledger_path.exists() and ledger.read(ledger_path, strict=False)):
        time.sleep(0.05)
    done.append(on_workers(cluster, os.getpid))
    os.kill(done[0][0], signal.SIGKILL)


def test_a_killed_worker_loses_nothing(grid, cluster):
    grid.grid.write_text("[[grid]]\nseed = [0, 1, 2, 3]\nepochs = 20\n")
    s, done = replace(grid, scheduler=cluster.scheduler_address), []
    killer = threading.Thread(target=kill_one, args=(cluster, grid.ledger, done))
    killer.start()
    assert go(s) == 0
    killer.join()
    records = ledger.read(grid.ledger)
    assert sorted(r["config"]["seed"] for r in records) == [0, 1, 2, 3]
    assert all(r["status"] == "finished" for r in records)
    assert done[0][0] not in on_workers(cluster, os.getpid)
    # Who made it does not show in the numbers.
    again = train.run(train.Config(**records[-1]["config"]))
    assert {**again["results"], "seconds": 0} == {**records[-1]["results"], "seconds": 0}


def poison(config, *options):
    if config.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {**sweep.failure(config, "", 0.0), "status": "finished"}


def test_a_run_that_kills_its_workers_is_recorded_as_failed(grid, cluster, monkeypatch):
    grid.grid.write_text("[[grid]]\nseed = [0, 1]\n")  # one for each worker
    monkeypatch.setattr(sweep, "job", poison)
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 0)
    monkeypatch.setattr(ledger, "append", lambda path, record: appended.append(record))
    appended = []
    monkeypatch.setattr(sweep, "outcome", lambda record: "")
    assert go(replace(grid, scheduler=cluster.scheduler_address)) == 1
    assert {r["config"]["seed"]: r["status"] for r in appended} == {0: "finished", 1: "failed"}
    assert next(r for r in appended if r["status"] == "failed")["error"].startswith("its worker died each time")


def test_a_scheduler_that_is_not_there_is_named(grid, monkeypatch):
    monkeypatch.setattr(sweep, "PATIENCE", 0.5)
    with pytest.raises(OSError, match=r"no scheduler at tcp://127.0.0.1:1 .*; start one with: dask scheduler"):
        go(replace(grid, scheduler="tcp://127.0.0.1:1"))


def test_workers_that_do_not_fit_are_refused_with_the_remedy(grid, cluster, monkeypatch):
    monkeypatch.setattr(sweep, "PATIENCE", 0.1)
    s = replace(grid, scheduler=cluster.scheduler_address, resources=("TPU=2",))
    with pytest.raises(
        ValueError, match=r"\d workers and needs one that offers TPU=2; .*--memory-limit 0 --resources TPU=2"
    ):
        go(s)

    class Fat:
        def scheduler_info(self, n_workers):
            return {"workers": {"a": {"nthreads": 8, "resources": {}}}}

    with pytest.raises(ValueError, match="a worker has 8 threads, and runs must not share a process; start them with"):
        sweep.fitting(Fat(), {})


def test_the_command_runs_local_workers_and_ctrl_c_ends_it_cleanly(tmp_path):
    (tmp_path / "grid.toml").write_text("[[grid]]\nseed = [0, 1]\nepochs = [2, 3000]\n")
    command = [sys.executable, "-m", "dpivon", "sweep", "grid.toml", "--workers", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("1 of 4"):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers too
    assert process.wait(120) == 130
    assert process.stderr.read() == ""
    assert lines[0] == "4 runs, 0 of them in runs.jsonl, 4 to run\n"
    assert "accuracy" in lines[1]
    assert lines[-1] == "stopped; what is done is in runs.jsonl, and the same command goes on from there\n"
    assert [r["status"] for r in ledger.read(tmp_path / "runs.jsonl")] == ["finished"]


def test_a_single_worker_is_another_process(tmp_path):
    """joblib would run the jobs of one worker in this process: at the wrong place, and deaf to Ctrl-C."""
    with sweep.engine(sweep.Sweep(tmp_path / "grid.toml", workers=1), {"digits"}) as (parallel, width):
        (pid,) = parallel(iter([(lambda config: os.getpid(), (None,), {})]))
    assert width == 1
    assert pid != os.getpid()


def test_results_are_of_the_grid_and_of_no_other_runs(grid, serial):
    grid()
    configs = read(grid.grid)
    ledger.append(grid.ledger, train.run(replace(configs[0], seed=7)))
    ledger.append(grid.ledger, sweep.failure(replace(configs[0], seed=8), "ValueError: no", 0.0))
    found, missing = sweep.results(grid.grid, grid.ledger)
    assert [r["key"] for r in found] == [sweep.key(config) for config in configs]
    assert missing == []
    grid.grid.write_text(GRID.replace("seed = 0", "seed = [7, 8, 9]"))
    found, missing = sweep.results(grid.grid, grid.ledger)
    assert [r["config"]["seed"] for r in found] == [7]
    assert len(missing) == 11  # the one that failed is missing


def test_local_workers_keep_the_memory_that_they_freed(grid):
    with sweep.engine(replace(grid, workers=1), []) as (parallel, width):
        assert width == 1
        assert list(parallel([(os.environ.get, ("MALLOC_TRIM_THRESHOLD_",), {})])) == [None]
