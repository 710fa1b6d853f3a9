"""What the README and the setup page tell a reader to type works, and what they show is what comes out."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro

from dpivon import __main__ as command_line
from dpivon import audit, bench, config, ledger, models, posterior, train
from dpivon.methods import METHODS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = (ROOT / "book" / "setup.md").read_text(encoding="utf-8")
INTRO = (ROOT / "book" / "intro.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a Markdown page in one language, without the indentation they have in a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def commands() -> list[list[str]]:
    """Each shell command of the pages, as words; settings before a command are left out."""
    lines = "\n".join(text for page in (README, SETUP, INTRO) for text in blocks(page, "bash")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [[w for i, w in enumerate(line) if "=" not in w or i > 0] for line in words if line]


def dpivon_commands() -> list[list[str]]:
    return [words[3:] for words in commands() if words[:3] == ["python", "-m", "dpivon"]]


def run_python(text: str) -> dict:
    namespace: dict = {"__name__": "readme"}
    torch.manual_seed(0)
    exec(compile(text, "README.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("optimizer", [None, "torch.optim.Adam(model.parameters())"])
def test_the_code_of_the_readme_trains_a_private_model(optimizer, capsys):
    (text,) = blocks(README, "python")
    lines = [line for line in text.splitlines() if line and "import" not in line]
    assert len(lines) == 12
    ours, context = next(line for line in lines if line.startswith("optimizer =")), "with optimizer.sampled_params():"
    assert text.count(context) == 1
    if optimizer is not None:
        text = text.replace(ours, f"optimizer = {optimizer}").replace(context, "if True:")
    n = run_python(text)
    right = (n["model"](n["x"]).argmax(1) == n["y"]).double().mean()
    assert right > 0.6, "it should learn three classes that a linear model can tell apart"
    printed = capsys.readouterr().out
    epsilon = float(re.match(r"\(([\d.]+), 1e-05\)-differential privacy", printed)[1])
    assert 2.9 < epsilon <= 3.0
    assert "q = 200 / 2000" in printed


def test_each_make_target_exists():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = {words[1] for words in commands() if words[0] == "make"}
    named |= set(re.findall(r"`make ([a-z]+)[` ]", README + SETUP + INTRO))
    assert named >= {"book", "test", "help"}
    assert named <= set(targets)


def test_each_dpivon_command_is_understood():
    found = dpivon_commands()
    assert {words[0] for words in found} >= {"train", "epsilon", "audit", "sweep", "ledger"}
    for words in found:
        parsed = tyro.extras.subcommand_cli_from_dict(command_line.COMMANDS, args=words)
        if isinstance(parsed, command_line.Train):
            assert train.resolve(parsed.config).epochs > 0
    # The benchmark stands in a sentence.
    options = re.search(r"`(--models lenet --batch-sizes 128)`", SETUP)[1].split()
    assert tyro.cli(bench.Bench, args=options).batch_sizes == (128,)


def test_the_published_posterior_is_used_as_setup_says(output, capsys):
    (words,) = [words for words in dpivon_commands() if "--samples" in words]
    output(*words, "--epochs", "1")
    text = blocks(SETUP, "python")[1]
    namespace = {"images": torch.zeros(3, 1, 8, 8)}
    exec(compile(text, "setup.md", "exec"), namespace)
    assert capsys.readouterr().out.endswith("mlp (1, 8, 8)\n")
    assert namespace["log_probs"].shape == (3, 10)


def test_own_data_and_an_own_network_go_the_whole_way(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "DEFAULTS", dict(config.DEFAULTS))
    monkeypatch.setattr(train, "DEFAULTS", config.DEFAULTS)
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    namespace = run_python(blocks(SETUP, "python")[0])
    record, patients = namespace["record"], namespace["patients"]
    assert ledger.read("patients.jsonl")[0]["config"]["data"] == "patients"
    assert 1.9 < record["privacy"]["epsilon"] <= 2
    assert record["results"]["samples"]["accuracy"] > 0.5
    assert float(capsys.readouterr().out) == record["results"]["samples"]["nll"]
    got = posterior.load("patients.safetensors", models.build("own", (1, 1, 12), 3))
    assert got.log_probs(patients.x_test).shape == (200, 3)
    again = train.Config(data="patients", method="dp-sgd", epsilon=2, lr=0.5, seed=0)
    assert not audit.black_box(again, patients, canaries=200).rejected
    monkeypatch.setitem(config.DEFAULTS, "others", config.DEFAULTS["patients"])
    with pytest.raises(ValueError, match=r"the images are called 'patients' and config\.data 'others'"):
        train.run(replace(again, data="others"), images=patients)


@pytest.fixture
def output(tmp_path, monkeypatch, capsys):
    """Run `python -m dpivon` inside this process; what it printed, line by line."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["dpivon", *words])
        command_line.main()
        return capsys.readouterr().out.splitlines()

    return call


def test_the_run_shown_in_setup_is_the_run_that_happens(output):
    assert "python -m dpivon train --seed 0\n" in SETUP
    (text,) = blocks(SETUP, "text")
    shown = [line for line in text.splitlines() if line != "..."]
    printed = output("train", "--seed", "0")
    # Speed and seconds belong to the machine; the key changes with every new setting.
    mask = r"[\d,]+(?= images/s| s$)|(?<= as )[0-9a-f]{16}$"
    masked = [[re.sub(mask, "#", line) for line in lines] for lines in (shown, printed)]
    assert len(masked[0]) > 10
    number = r"\d+\.\d+"
    for line in masked[0]:
        if line.startswith(("epoch", "test set")):
            # The last digits differ from machine to machine, because sums are rounded in another order.
            same = [other for other in masked[1] if re.sub(number, "#", other) == re.sub(number, "#", line)]
            values = [[float(v) for v in re.findall(number, text)] for text in (line, *same)]
            assert any(other == pytest.approx(values[0], abs=0.03) for other in values[1:]), line
        else:
            assert line in masked[1]
    assert printed[-1].split()[-1] == ledger.read("runs.jsonl")[0]["key"]


def test_the_epsilon_command_of_setup_finds_the_noise_of_that_run(output):
    words, *others = [words for words in dpivon_commands() if words[0] == "epsilon" and "--n" in words]
    assert all(other == words for other in others)
    rdp = next(line for line in output(*words) if line.startswith("RDP"))
    sigma = re.search(r"sigma ([\d.]+),", SETUP)[1]
    assert float(rdp.split()[3]) == pytest.approx(float(sigma), abs=1e-3)


def first_column(header: str) -> list[str]:
    """All that stands in backticks in the first column of the table of the setup page that begins with `header`."""
    rows = SETUP[SETUP.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_setup_explains_every_field_of_the_ledger():
    assert sorted(first_column("| Field |")) == sorted({**ledger.FIELDS, **ledger.OPTIONAL})


def test_setup_quotes_errors_that_exist():
    sources = [*(ROOT / "dpivon").glob("*.py"), ROOT / "tools" / "install.sh"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # adjacent strings are one
    quoted = [text for text in first_column("| It says |") if text != "No module named dpivon"]  # which is Python's
    assert len(quoted) > 8
    for text in quoted:
        for part in text.split("..."):
            assert part.strip() in source, text


def test_the_files_that_the_readme_links_to_exist():
    targets = re.findall(r"\]\(([^)\s]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    local = [target for target in targets if "://" not in target]
    assert len(local) >= 5
    for target in local:
        assert (ROOT / target.partition("#")[0]).exists(), target


def test_every_line_of_the_ladder_has_a_text_equivalent():
    picture = (ROOT / "book" / "_static" / "ladder.svg").read_text(encoding="utf-8")
    spoken = re.search(r"<desc[^>]*>(.*?)</desc>", picture, flags=re.DOTALL)[1]
    alt = re.search(r'alt="([^"]+)"', README)[1]
    for name in ("SGD", "DP-SGD", "IVON", "DP-IVON-Gradsq"):
        assert f">{name}</text>" in picture
        assert name in spoken
        assert name in alt


def test_the_introduction_names_the_methods_that_there_are():
    sentence = re.search(r"`train --method` takes (.*?)\. ", INTRO, flags=re.DOTALL)[1]
    assert re.findall(r"`([\w-]+)`", sentence) == list(METHODS)
