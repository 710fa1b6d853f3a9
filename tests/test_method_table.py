"""Methods compared in pages: the table and the roles that the ledger fills, and the page that chooses by them."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro
from sphinx.application import Sphinx
from test_numbers import typed_numbers

from dpivon import __main__ as command_line
from dpivon import records, seeds, sweep, train

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "_ext"))

import from_ledger  # noqa: E402

CENTER = "batch_size=1024 max_grad_norm=1"


def line(method, seed, nll, accuracy=0.5, epsilon=1.0, **config):
    """A finished run as the ledger has it, as far as pages look."""
    config = {"method": method, "seed": seed, "epsilon": epsilon, "samples": 0, "members": None, "lr": 1.0, **config}
    metrics = {"nll": nll, "accuracy": accuracy, "overconfidence": -nll}
    return {
        "key": repr(sorted(config.items(), key=str)), "status": "finished", "recipe": 2, "config": config,
        "privacy": None, "results": {"mean": metrics}, "hardware": {}, "versions": {},
        "cost": {"stored": 1000, "cpu_seconds": 10.0 + seed, "memory_mib": 7.0},
    }  # fmt: skip


def runs(method, nlls, **more):
    return [line(method, seed, nll, **more) for seed, nll in enumerate(nlls)]


@pytest.fixture
def book(monkeypatch):
    """Puts lines into the place of every ledger."""

    def put(*groups):
        found = [r for group in groups for r in group]
        monkeypatch.setattr(from_ledger, "lines", lambda file: found)

    return put


def differing(p, seed=0):
    """Five differences with mean 0.1 whose paired test has this p-value."""
    from scipy.stats import t

    z = np.random.default_rng(seed).normal(size=5)
    z = (z - z.mean()) / z.std(ddof=1)
    return 0.1 + z * 0.1 * np.sqrt(5) / t.isf(p / 2, 4)


def test_the_test_data_have_their_p_values():
    base = np.arange(5.0)
    for p in (0.001, 0.04, 0.3):
        d = seeds.paired(runs("a", base + differing(p)), runs("b", base), "nll")
        assert d.p == pytest.approx(p)
        assert d.mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        ((0.001, 0.04), []),  # after the first is told apart, the second is alone: 0.05 / 1
        ((0.02, 0.03), []),  # 0.05 / 2, then 0.05 / 1
        ((0.03, 0.04), ["b", "c"]),  # the smallest is above 0.05 / 2, so nothing is told apart
        ((0.001, 0.06), ["c"]),
        ((0.06, 0.001), ["b"]),
    ],
)
def test_who_is_told_from_the_best(book, p, kept):
    base = np.linspace(0.3, 0.5, 5)
    book(runs("b", base + differing(p[0])), runs("a", base), runs("c", base + differing(p[1], seed=1)))
    assert sorted(from_ledger.best(from_ledger.methods("x"), "nll")) == ["a", *kept]


def test_more_is_better_for_accuracy_alone(book):
    book(
        *(
            [line(m, s, nll=v + s / 100, accuracy=v + s / 100) for s in range(5)]
            for m, v in (("low", 0.1), ("high", 0.7))
        )
    )
    found = from_ledger.methods("x")
    assert from_ledger.best(found, "nll") == ["low"]
    assert from_ledger.best(found, "accuracy") == ["high"]
    assert from_ledger.best(found, "overconfidence") == []


def test_one_seed_is_shown_and_not_compared(book):
    book(runs("a", [0.3, 0.4, 0.5]), runs("single", [0.1]), runs("b", [1.3, 1.41, 1.5]))
    table = from_ledger.table(["nll"], ["x"])
    assert table.rows == [
        ("single", [("0.100", False)]), ("a", [("0.400 ± 0.058", True)]), ("b", [("1.403 ± 0.058", False)]),
    ]  # fmt: skip
    assert "1 to 3 seeds" in table.note
    assert "one run, and not compared" in table.note


def test_nothing_is_bold_where_nothing_is_told_apart(book):
    book(runs("a", [0.3, 0.4, 0.5]), runs("b", [0.5, 0.3, 0.45]))
    assert not any(bold for _, cells in from_ledger.table(["nll"], ["x"]).rows for _, bold in cells)


def test_rows_are_in_the_order_of_mean_ranks_and_gaps_come_last(book):
    book(
        runs("middle", [0.2, 0.2], epsilon=1.0), runs("middle", [0.1, 0.1], epsilon=8.0),
        runs("first", [0.1, 0.1], epsilon=1.0), runs("first", [0.2, 0.2], epsilon=8.0, accuracy=0.9),
        runs("last", [9.0, 9.0], epsilon=1.0), runs("last", [0.3, 0.3], epsilon=8.0),
        runs("half", [0.01, 0.01], epsilon=8.0),
    )  # fmt: skip
    table = from_ledger.table(["nll", "accuracy"], ["x epsilon=1", "x epsilon=8"])
    assert [name for name, _ in table.rows] == ["first", "middle", "last", "half"]
    assert [text for text, _ in table.rows[-1][1]][:2] == ["–", "–"]
    assert table.rows[0][1][3][0].startswith("0.900")
    assert table.heads == ["ε = 1", "ε = 8"]
    assert table.note.startswith("14 runs, 2 seeds")


def test_heads_say_what_was_spent(book):
    book(runs("sgd", [0.1, 0.2], epsilon=None))
    assert from_ledger.table(["nll"], ["x"]).heads == ["without privacy"]
    book(runs("a", [0.1, 0.2], epsilon=2.9971), runs("b", [0.1, 0.2], epsilon=0.4466))
    assert from_ledger.table(["nll"], ["x"]).heads == ["ε = 0.447 to 2.998"]  # rounded up


def test_settings_are_not_averaged(book):
    book(runs("a", [0.3, 0.4]), runs("a", [0.5, 0.6], lr=2.0))
    with pytest.raises(ValueError, match="a has several configurations in 'x'; add a condition on lr"):
        from_ledger.methods("x")
    assert from_ledger.average("x a nll lr=2") == "0.550 ± 0.050"


def test_a_repeated_line_counts_once_and_a_failed_one_not(book):
    first = line("a", 0, 0.9)
    failed = {**line("a", 2, 5.0), "status": "failed"}
    book([first, line("a", 1, 0.2), {**line("a", 0, 0.4)}, failed])
    assert from_ledger.average("x a nll") == "0.300 ± 0.100"
    assert from_ledger.average("x a overconfidence") == "−0.300 ± 0.100"


def test_costs(book):
    book(runs("a", [0.1, 0.2, 0.3], samples=32), runs("ensemble", [0.1], members=4), runs("plain", [0.1]))
    assert from_ledger.cost("x a") == "1,000 numbers, 32 passes, 11 s, 7 MiB"
    assert "4 passes" in from_ledger.cost("x ensemble")
    assert "1 pass," in from_ledger.cost("x plain")
    book(runs("a", [0.1], samples=32), runs("a", [0.1], samples=8))
    with pytest.raises(ValueError, match=r"by \[8, 32\] networks"):
        from_ledger.cost("x a")


def test_ranges(book):
    book(runs("a", [0.25, 0.5]), runs("b", [0.75, 0.5]), [{**line("b", 2, 9.0), "status": "failed"}])
    assert from_ledger.extent("x results.*.nll") == "0.25 to 0.75"
    assert from_ledger.extent("x results.mean.overconfidence method=b") == "−0.75 to −0.5"
    assert from_ledger.extent("x cost.stored") == "1e+03"
    with pytest.raises(ValueError, match="has a number in"):
        from_ledger.extent("x results.nothing")


def test_a_claim_that_does_not_hold_is_refused(book):
    book(runs("a", [0.1, 0.2, 0.3]), runs("b", [1.1, 1.21, 1.3]))
    assert from_ledger.claim("x a nll; x a nll epsilon=1") == "a"
    with pytest.raises(ValueError, match="b is not among the best by nll in 'x': a"):
        from_ledger.claim("x b nll")
    with pytest.raises(ValueError, match="b is not among"):
        from_ledger.claim("x a nll; x b nll")
    book(runs("a", [0.1]))
    with pytest.raises(ValueError, match="none"):
        from_ledger.claim("x a nll")
    book(runs("a", [0.1, 0.2]), runs("b", [0.2, 0.1]))
    with pytest.raises(ValueError, match="one method at a time, got a, b"):
        from_ledger.claim("x a nll; x b nll")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_ledger.average("x a"), "FILE, 2 names"),
        (lambda: from_ledger.cost("x"), "FILE, 1 name "),
        (lambda: from_ledger.average("x a bll"), "no metric 'bll'; choose one of accuracy, nll"),
        (lambda: from_ledger.table(["nll"], ["x method=c"]), "no finished run is left by 'x method=c'"),
    ],
)
def test_mistakes_are_named(book, call, message):
    book(runs("a", [0.1, 0.2]))
    with pytest.raises(ValueError, match=message):
        call()


def test_the_table_has_the_ledgers_numbers():
    """Against the lines themselves, by numpy."""
    table = dict(from_ledger.table(["accuracy", "nll"], ["digits epsilon=3"]).rows)
    found = [r for r in from_ledger.lines("digits") if r["config"]["epsilon"] == 3]
    assert set(table) == {r["config"]["method"] for r in found}
    for name, cells in table.items():
        for metric, (text, _) in zip(("accuracy", "nll"), cells, strict=True):
            each = [
                r["results"].get("samples", r["results"]["mean"])[metric]
                for r in found
                if r["config"]["method"] == name
            ]
            assert text == f"{np.mean(each):.3f} ± {np.std(each, ddof=1) / len(each) ** 0.5:.3f}"


def built(folder, text):
    """A page with this text, as HTML, and Sphinx' warnings."""
    (folder / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / '_ext')!r})\nextensions = ['from_ledger']\n"
        "suppress_warnings = ['app.add_role', 'app.add_directive']\n"  # of an earlier application in this process
    )
    (folder / "index.rst").write_text(f"Page\n====\n\n{text}\n")
    with (folder / "warnings").open("w") as warnings:
        Sphinx(folder, folder, folder / "out", folder / "trees", "html", status=None, warning=warnings).build()
    return (folder / "out" / "index.html").read_text(), (folder / "warnings").read_text()


def test_the_directive_makes_a_table(tmp_path, book):
    book(
        runs("a", [0.1, 0.2, 0.3], epsilon=1.0),
        runs("a", [0.1, 0.2, 0.3], epsilon=8.0),
        runs("b", [1.1, 1.21, 1.3], epsilon=8.0),
    )
    page, warnings = built(
        tmp_path, ".. ledger-table:: nll accuracy\n\n   x epsilon=1\n   x epsilon=8\n\n:ledger-best:`x a nll epsilon=8`"
    )
    assert not warnings
    assert re.search(r'<table class="[^"]*ledger-table', page)
    assert re.search(
        r'<th class="head" rowspan="2"><p>method</p></th>\s*<th class="head" colspan="2"><p>ε = 1</p>', page
    )
    (first,) = re.findall(r'<tr class="row-even"><td>.*?</tr>|<tr class="row-odd"><td>.*?>a<.*?</tr>', page, re.DOTALL)[
        :1
    ]
    assert len(re.findall("<td>", first)) == 5
    assert "<strong>0.200 ± 0.058</strong>" in first
    assert "9 runs, 3 seeds" in page
    assert re.search(r'<code class="[^"]*from-ledger[^"]*">', page)


def test_the_directive_stops_a_build_where_nothing_is_left(tmp_path, book):
    book(runs("a", [0.1, 0.2]))
    _, warnings = built(tmp_path, ".. ledger-table:: nll\n\n   x epsilon=3\n\n:ledger-best:`x b nll`")
    assert "ledger-table: no finished run is left by 'x epsilon=3'" in warnings
    assert "ledger-best: b is not among the best by nll" in warnings


# ------------------------------------------------------------ the page

PAGE = (ROOT / "book" / "choose.md").read_text(encoding="utf-8")


def nll(text):
    """The mean NLL of each method."""
    return {name: mean for name, (mean, _) in from_ledger.means(from_ledger.methods(text), "nll").items()}


def test_no_number_is_typed():
    assert not typed_numbers(PAGE)


def test_at_strong_privacy_the_iterates_are_ahead_of_what_the_page_names():
    for loser in ("dp-sgd", "dp-sgd-tempered", "dp-ivon-gradsq"):
        nll = from_ledger.means(from_ledger.methods("strong"), "nll")
        assert nll["dp-sgd-snapshots"][0] < nll[loser][0], loser


def test_what_the_page_says_of_the_tumors_holds():
    """Averaged predictions are told from a private temperature, and not from the others."""
    results = ROOT / "book" / "results"
    runs, lacking = sweep.results(results / "grids" / "tumors.toml", results / "tumors.jsonl")
    assert not lacking
    groups = seeds.by_method([r for r in runs if r["config"]["method"] != "dp-sgd-average"])
    others = ["dp-sgd-tempered", "dp-sgd", "dp-ivon-gradsq"]
    found = [seeds.paired(groups["dp-sgd-snapshots"], groups[name], "nll") for name in others]
    temperature, *rest = seeds.holm([d.p for d in found])
    assert found[0].mean < 0
    assert temperature <= 0.05 < min(rest)
    assert {d.seeds for d in found} == {20}


def test_the_tables_of_the_page_can_be_made():
    blocks = re.findall(r"^```\{ledger-table\} (.*)\n((?:.+\n)+?)```$", PAGE, re.MULTILINE)
    assert len(blocks) == PAGE.count("{ledger-table}") == 3
    for metrics, selections in blocks:
        assert from_ledger.table(metrics.split(), selections.splitlines()).rows


def test_the_commands_are_understood():
    text = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", "")
    found = [shlex.split(command)[3:] for command in text.splitlines()]
    assert len(found) == 6
    for words in found:
        parsed = tyro.extras.subcommand_cli_from_dict(command_line.COMMANDS, args=words)
        train.resolve(parsed.config)
    taken = set(re.findall(r"^\| .*? \| (?:\{ledger-best\}`\w+ )?`?(dp-[\w-]+)", PAGE, re.MULTILINE))
    assert taken == {words[words.index("--method") + 1] for words in found}


def test_what_the_page_says_of_the_digits_holds():
    at = {e: from_ledger.methods(f"digits epsilon={e}") for e in (1, 3)}
    front = {"dp-adambc", "dp-sgd-average", "dp-sgd-snapshots"}
    assert set(list(from_ledger.means(at[1], "nll"))[:3]) == front, "the three in front"
    assert front <= set(from_ledger.best(at[1], "nll"))
    plain = nll("digits epsilon=3")
    assert all(v > plain["dp-sgd"] for name, v in plain.items() if name.startswith("dp-ivon")), "too modest already"
    assert from_ledger.means(at[3], "overconfidence")["dp-sgd"][0] < 0.02
    stored = {r["config"]["method"]: r["cost"]["stored"] for r in from_ledger.lines("digits")}
    assert stored["dp-sgd"] == min(stored.values()) == stored["dp-ivon-gradsq"] / 2


def test_what_the_page_says_of_cifar_holds():
    moderate, strong = (from_ledger.methods(f"lenet noise_multiplier={s} {CENTER}") for s in (1, 4))
    assert from_ledger.means(moderate, "overconfidence")["dp-sgd"][0] > 0.05, "too sure"
    assert {"dp-ivon-gradsq", "dp-ivon-constant"} <= set(from_ledger.best(moderate, "nll"))
    assert "dp-sgd" not in from_ledger.best(moderate, "nll")
    assert len(from_ledger.best(strong, "nll")) == len(strong), "no method is told from the best"
    seconds = {n: np.median([r["cost"]["cpu_seconds"] for r in group]) for n, group in moderate.items()}
    assert 0.75 < seconds["dp-ivon-gradsq"] / seconds["dp-sgd"] < 1.33, "training takes about as long"
    at_mean = {n: np.mean([r["results"]["mean"]["nll"] for r in group]) for n, group in moderate.items()}
    assert at_mean["dp-ivon-gradsq"] > at_mean["dp-sgd"], "the lead is in the average over draws"
    (larger_norm,) = nll("lenet method=dp-sgd noise_multiplier=1 batch_size=1024 max_grad_norm=5 lr=0.8").values()
    assert larger_norm < min(nll(f"lenet noise_multiplier=1 {CENTER}").values())
    moved = [
        r for r in from_ledger.finished(f"lenet noise_multiplier=2 {CENTER}") if r["config"]["lr"] in (4, 0.0056, 8)
    ]
    assert max(moved, key=lambda r: records.value(r, "nll"))["config"]["method"] == "dp-ivon-gradsq", (
        "settings do not travel"
    )
