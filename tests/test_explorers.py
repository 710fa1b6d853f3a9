"""The explorers: what they show is what dpivon computes, and a browser can use them, by keyboard and from a file."""

import gzip
import json
import math
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from built_site import SITE, missing, need_site
from scipy.integrate import quad
from scipy.stats import ncx2, norm

from dpivon import accounting, curvature
from tools import explorers

RUN = (1.0, 512 / 50_000, 977)  # sigma_p, q, T of the first setting


@pytest.fixture(scope="module")
def prv() -> dict[str, Any]:
    return explorers.read("accounting")


@pytest.fixture(scope="module")
def curved() -> dict[str, Any]:
    return explorers.read("curvature")


# ------------------------------------------------------------ closed forms


@pytest.mark.parametrize("a", [0.0, 0.1, 0.7, 2.0])
def test_projected_mean_and_zeros_are_the_integrals(a: float) -> None:
    mean = quad(lambda z: max((a + z) ** 2 - 1, 0) * norm.pdf(z), -12, 12, points=[-1 - a, 1 - a], limit=200)[0]
    assert explorers.projected_mean(a) == pytest.approx(mean, abs=1e-9)
    zero = quad(norm.pdf, -1 - a, 1 - a)[0]
    assert explorers.projected_zeros(a, 3) == pytest.approx(zero**3, abs=1e-9)


@pytest.mark.parametrize(("a", "steps"), [(0.0, 1), (0.3, 7), (1.5, 40), (0.1, 1000)])
def test_averaged_mean_and_zeros_are_the_integrals(a: float, steps: int) -> None:
    density = ncx2(steps, steps * a**2)
    spread = 40 * math.sqrt(2 * steps + 4 * steps * a**2)
    above = quad(lambda x: (x / steps - 1) * density.pdf(x), steps, steps * (1 + a**2) + spread, limit=200)[0]
    assert explorers.averaged_mean(a, steps) == pytest.approx(above, abs=1e-7)
    assert explorers.averaged_zeros(a, steps) == pytest.approx(
        1 - quad(density.pdf, steps, np.inf, limit=200)[0], abs=1e-6
    )


def test_floor_is_the_modules(curved: dict[str, Any]) -> None:
    assert curved["floor"] == pytest.approx(2 * norm.pdf(1), abs=1e-6)
    assert curved["floor"] == pytest.approx(curvature.noise_floor({"scale": 1.0, "noise_std": 1.0}), abs=1e-6)


def test_orders_are_the_modules() -> None:
    """With a memory far longer than the run the module's exponential averages are the plain ones of the explorer."""
    steps, u = 30, explorers.block()
    z = torch.from_numpy(np.random.default_rng(1).standard_normal((steps, len(u))))
    group = {"scale": 1.0, "noise_std": 1.0, "beta2": 1 - 1e-7, "ess": 1.0, "weight_decay": 0.0}
    plain = ((0.5 * u + z.numpy()) ** 2 - 1).mean(0)
    for name, expected in {
        "average-then-project": plain.clip(0),
        "average-then-shrink": explorers.shrink(plain, steps),
    }.items():
        state: dict[str, Any] = {"sizes": [len(u)]}
        for t in range(steps):
            state["step"] = t + 1
            found = curvature.ESTIMATORS[name](torch.from_numpy(0.5 * u) + z[t], torch.zeros(0), state, group)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


# ------------------------------------------------------------- stored data


def test_stored_curvature_is_what_the_tool_computes(curved: dict[str, Any]) -> None:
    picked = [4, 11, 18]
    first, second, projected = explorers.simulate(explorers.STEPS[:4], [explorers.SIGNALS[k] for k in picked])
    shown = np.arange(explorers.SHOWN) * 20 + 10
    np.testing.assert_allclose(np.array(curved["u"]), explorers.block()[shown], rtol=1e-3)
    np.testing.assert_allclose(np.array(curved["first"])[:4], first[:, shown], rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(np.array(curved["second"])[:4], second[:, shown] - 1, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(np.array(curved["projected"])[picked, :4], projected[:, :, shown], rtol=6e-3)
    for k in picked:
        a, t = explorers.SIGNALS[k], 3
        drawn, signals = explorers.repeated(a, explorers.STEPS[t]), a * explorers.block()
        assert curved["table"]["project"][k][t][0] == pytest.approx(explorers.projected_mean(signals).mean(), rel=1e-3)
        assert curved["table"]["average"][k][t][1] == pytest.approx(
            explorers.averaged_zeros(signals, explorers.STEPS[t]).mean(), rel=1e-3
        )
        assert curved["table"]["shrink"][k][t][:2] == pytest.approx(drawn["shrink"][:2], rel=1e-3)
        assert curved["table"]["shrink"][k][t][2] == explorers.short(drawn["shrink"][2])  # None where all are alike
        assert drawn["average"][0] == pytest.approx(curved["table"]["average"][k][t][0], rel=0.05)  # drawn, and exact


def test_stored_prv_is_the_accountants(prv: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    for i, j, k in zip(rng.integers(0, 10, 5), rng.integers(3, 14, 5), rng.integers(0, 5, 5), strict=True):
        rate, noise, steps = explorers.RATES[i], explorers.NOISES[j], explorers.UPDATES[k]
        rdp = accounting.epsilon(noise, rate, steps, explorers.DELTA)
        assert explorers.rdp_prices(noise, rate, [steps])[0] == pytest.approx(rdp, rel=1e-9)
        stored = prv["prv"][(i * len(explorers.NOISES) + j) * len(explorers.UPDATES) + k]
        assert (stored is not None) == explorers.affordable(rdp, steps)
        if stored is not None:
            price = accounting.epsilon(noise, rate, steps, explorers.DELTA, "prv")
            assert math.exp(stored / prv["resolution"]) == pytest.approx(price, rel=1e-4)


def test_interpolation_is_within_its_bound(prv: dict[str, Any]) -> None:
    assert 0 < prv["error"] < 0.02
    assert explorers.interpolation_error(prv["prv"], explorers.random_runs([1]), 8) < 0.02
    shifted = [None if value is None else value + 300 for value in prv["prv"]]  # 3%: the measure is not blind
    assert explorers.interpolation_error(shifted, explorers.random_runs([1]), 1) > 0.01


def test_nothing_is_extrapolated(prv: dict[str, Any]) -> None:
    assert explorers.interpolated(1.0, 0.01, 1000, prv["prv"]) is not None
    for run in [
        (0.4, 0.01, 1000),
        (25, 0.01, 1000),
        (1, 0.0005, 1000),
        (1, 0.6, 1000),
        (1, 0.01, 9),
        (1, 0.01, 30_000),
    ]:
        assert explorers.interpolated(*run, prv["prv"]) is None, run
    holes = list(prv["prv"])
    cell = [nodes.index(max(n for n in nodes if n <= x)) for nodes, x in
            ((explorers.RATES, 0.01), (explorers.NOISES, 1.0), (explorers.UPDATES, 1000))]  # fmt: skip
    holes[(cell[0] * len(explorers.NOISES) + cell[1] + 1) * len(explorers.UPDATES) + cell[2]] = None
    assert explorers.interpolated(1.0, 0.01, 1000, holes) is None


def test_a_second_run_writes_the_same_bytes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorers, "STEPS", [1, 3, 10])
    monkeypatch.setattr(explorers, "SIGNALS", [0.1, 1])
    written = []
    for _ in range(2):
        explorers.write("curvature", explorers.curvature_data(), explorers.curvature_table(), tmp_path)
        written.append([path.read_bytes() for path in sorted(tmp_path.iterdir())])
    assert written[0] == written[1]
    assert explorers.read("curvature", tmp_path)["steps"] == [1, 3, 10]


def test_tables_without_javascript_are_current() -> None:
    assert (explorers.STATIC / "explore_curvature.html").read_text() == explorers.curvature_table()
    assert (explorers.STATIC / "explore_accounting.html").read_text() == explorers.accounting_table()


def test_files_are_small_and_ask_nobody() -> None:
    for name in ("explore_accounting.js", "explore_curvature.js", "explorers.js", "explorers.css"):
        text = (explorers.STATIC / name).read_text(encoding="utf-8")
        assert len(gzip.compress(text.encode())) < 50_000, name
        assert not re.search(r"fetch\(|XMLHttp|import |@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text), name


# ------------------------------------------------------------- the browser


def in_browser(test: Any) -> Any:
    for mark in (pytest.mark.browser, pytest.mark.site, pytest.mark.timeout(240)):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    need_site()
    from playwright.sync_api import sync_playwright
    from test_browser import FLAGS

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        missing("no chromium: install it (Debian, Ubuntu: `sudo apt install chromium`) to check the site in a browser")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield started
        started.close()


class Explorer:
    """A page with an explorer, opened from the disk, that writes down what goes wrong in it."""

    def __init__(self, browser: Any, name: str, state: str = "", **options: Any) -> None:
        self.errors: list[str] = []
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else self.errors.append(r.url)
        )
        self.url = (SITE / "book" / f"explore_{name}.html").as_uri()
        self.page.goto(self.url + (f"#{state}" if state else ""), wait_until="load")

    def read(self, name: str) -> str:
        """The number of a reading, by its name."""
        return str(self.page.locator(".ex-reading", has_text=name).locator(".ex-number").first.inner_text())

    def sentence(self) -> str:
        self.page.wait_for_timeout(350)  # it speaks when the slider rests
        return str(self.page.locator("output").inner_text())

    def slider(self, label: str) -> Any:
        return self.page.get_by_role("slider", name=label)

    def press(self, label: str, *keys: str) -> None:
        slider = self.slider(label)
        slider.focus()
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture
def opened(chromium: Any) -> Iterator[Any]:
    pages: list[Explorer] = []

    def open_page(name: str, state: str = "", **options: Any) -> Explorer:
        pages.append(Explorer(chromium, name, state, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
        assert not page.errors, page.errors


@in_browser
def test_keys_move_the_price(opened: Any, prv: dict[str, Any]) -> None:
    """A key on the slider changes what is shown to what the accountants give."""
    explorer = opened("accounting")
    for keys, sigma in (((), 1.0), (("ArrowRight", "ArrowRight"), 1.1), (("PageUp",), 1.55), (("Home",), 0.5)):
        explorer.press("Noise multiplier", *keys)
        assert explorer.slider("Noise multiplier").get_attribute("aria-valuetext").startswith(f"{sigma:g} times")
        _, rate, steps = RUN
        rdp, exact = (accounting.epsilon(sigma, rate, steps, 1e-5, name) for name in ("rdp", "prv"))
        assert float(explorer.read("by RDP")) == pytest.approx(rdp, rel=6e-3)
        assert float(explorer.read("by PRV")) == pytest.approx(exact, rel=0.02)
        said = explorer.sentence()
        assert f"σₚ = {sigma:g} and 977 steps" in said
        assert explorer.read("by PRV") in said


@in_browser
def test_the_page_counts_as_the_accountants_do(opened: Any, prv: dict[str, Any]) -> None:
    explorer = opened("accounting")
    runs = [RUN, (0.55, 0.004, 300), (3.3, 0.2, 700), (12.0, 0.03, 20_000)]
    found = explorer.page.evaluate(
        """runs => runs.map(([s, q, t]) => [window.explorers.epsilonRdp(s, q, t, window.exploreAccounting),
        window.explorers.epsilonPrv(s, q, t, window.exploreAccounting)])""",
        [list(run) for run in runs],
    )
    for run, (rdp, between) in zip(runs, found, strict=True):
        assert rdp == pytest.approx(accounting.epsilon(*run, 1e-5), rel=1e-6)
        assert between == pytest.approx(explorers.interpolated(*run, prv["prv"]), rel=1e-9)


@in_browser
def test_what_is_not_known_is_said(opened: Any) -> None:
    explorer = opened("accounting", "n=50000&b=32&sigma=1&epochs=10")
    assert explorer.read("by PRV") == "—"
    assert float(explorer.read("by RDP")) > 0  # RDP needs no stored values
    assert "sampling rates from" in explorer.sentence()
    explorer.page.evaluate("location.hash = 'n=1438&b=2048&sigma=1&epochs=10'")
    assert "choose a smaller b" in explorer.sentence()
    assert explorer.read("by RDP") == "—"
    explorer.page.evaluate("location.hash = 'n=50000&b=16384&sigma=0.5&epochs=200'")
    assert "more than 20" in explorer.sentence()
    assert explorer.read("by RDP") == "more than 20"


@in_browser
def test_the_address_holds_the_state(opened: Any) -> None:
    explorer = opened("accounting")
    assert "#" not in explorer.page.url  # nothing has been changed
    explorer.page.get_by_role("radio", name="steps").check(force=True)
    explorer.press("Expected batch size", "ArrowRight", "ArrowRight")
    explorer.page.get_by_text("Keep this curve").click()
    explorer.press("Noise multiplier", "ArrowRight")
    shown = explorer.read("by RDP"), explorer.sentence()
    assert "b=768" in explorer.page.url
    assert "steps=1000" in explorer.page.url
    again = opened("accounting", explorer.page.url.split("#")[1])
    assert (again.read("by RDP"), again.sentence()) == shown
    assert again.page.locator(".ex-kept-dot").count() == 1
    again.page.evaluate("location.hash = 'three-things-to-try'")  # a heading, and no setting
    assert again.sentence() == shown[1]
    again.page.get_by_text("first setting").click()
    assert "b = 512, σₚ = 1 and 977 steps" in again.sentence()


@in_browser
def test_a_budget_finds_its_noise(opened: Any) -> None:
    explorer = opened("accounting")
    explorer.page.get_by_role("button", name="Choose the noise for epsilon 3").press("Enter")
    sigma = float(re.search(r"sigma=([\d.]+)", explorer.page.url)[1])  # type: ignore[index]
    assert accounting.epsilon(sigma, *RUN[1:], 1e-5) <= 3 < accounting.epsilon(sigma - 0.05, *RUN[1:], 1e-5)


@in_browser
def test_the_table_and_the_picture_say_the_same(opened: Any) -> None:
    explorer = opened("accounting")
    explorer.page.locator(".ex-table summary").press("Enter")
    now = explorer.page.locator(".ex-table tr", has_text="(now)").inner_text().split()
    assert now[-2:] == [explorer.read("by RDP"), explorer.read("by PRV")]
    picture = explorer.page.get_by_role("img", name="Epsilon against the noise multiplier")
    assert explorer.read("by RDP") in picture.locator("desc").text_content()
    # The mark stands where the axis says: between the grid lines of 1 and 3 for an epsilon between them.
    marks = explorer.page.evaluate(
        """() => { const svg = document.querySelector(".ex-picture svg");
        const find = (text) => [...svg.querySelectorAll("text[text-anchor=end]")].find((t) => t.textContent === text);
        const at = (text) => +find(text).getAttribute("y") - 4;
        return [at("1"), at("3"), +svg.querySelector("circle.ex-dot").getAttribute("cy")]; }"""
    )
    share = math.log(float(explorer.read("by RDP"))) / math.log(3)
    assert marks[2] == pytest.approx(marks[0] + share * (marks[1] - marks[0]), abs=1)


@in_browser
def test_keys_move_the_curvature(opened: Any, curved: dict[str, Any]) -> None:
    explorer = opened("curvature")
    for keys, label, order in (
        ((), "Signal over noise", "project"),
        (("ArrowRight",) * 3, "Signal over noise", "project"),
        (("ArrowLeft", "ArrowLeft"), "Steps averaged", "average"),
        (("End",), "Steps averaged", "shrink"),
    ):
        explorer.page.locator(f'input[value="{order}"]').check(force=True)
        explorer.press(label, *keys)
        a, steps = (
            float(explorer.slider(name).get_attribute("aria-valuetext").split()[0].replace(",", ""))
            for name in ("Signal over noise", "Steps averaged")
        )
        k, t = curved["signals"].index(a), curved["steps"].index(steps)
        mean, _, rank = curved["table"][order][k][t]
        assert float(explorer.read("mean estimate").split("\u00a0")[0]) == pytest.approx(mean, rel=6e-3)
        assert float(explorer.read("rank correlation")) == pytest.approx(rank, abs=0.006)
        assert f"a signal of {a:g} of the noise, averaged over {steps:,.0f} steps" in explorer.sentence()


@in_browser
def test_the_page_estimates_as_the_module_does(opened: Any, curved: dict[str, Any]) -> None:
    """The dots: projected ones are stored, the others follow from the stored sums, and equal `dpivon.curvature`'s."""
    explorer = opened("curvature")
    k, t = 11, 3
    a, steps = curved["signals"][k], curved["steps"][t]
    first, second, projected = explorers.simulate(explorers.STEPS[: t + 1], [a])
    average = second[t] + 2 * a * explorers.block() * first[t] + (a * explorers.block()) ** 2 - 1
    shown = np.arange(explorers.SHOWN) * 20 + 10
    expected = {
        "project": projected[0, t], "average": average.clip(0), "shrink": explorers.shrink(average, steps),
    }  # fmt: skip
    for order, values in expected.items():
        found, stretched = explorer.page.evaluate(
            """([order, k, t]) => [window.explorers.estimates(order, k, t, window.exploreCurvature),
            window.explorers.stretches(order, k, t, 1, window.exploreCurvature)]""",
            [order, k, t],
        )
        np.testing.assert_allclose(found, values[shown], rtol=6e-3, atol=1e-4)
        unit = 50_000 * (4 * 1.0 / 1024) ** 2
        truth = unit * (a * explorers.block()[shown]) ** 2 + 2e-4
        np.testing.assert_allclose(stretched, truth / (unit * values[shown] + 2e-4), rtol=0.02, atol=1e-3)


@in_browser
@pytest.mark.parametrize("name", ["accounting", "curvature"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_used_on_a_phone(opened: Any, name: str, scheme: str) -> None:
    """After use, on a narrow screen: nothing overflows, nothing serious for axe, colors of the theme, nothing moves."""
    from axe_playwright_python.sync_playwright import Axe
    from test_browser import OVERFLOW

    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme, "reduced_motion": "reduce"}
    explorer = opened(name, **phone)
    page = explorer.page
    page.locator("input[type=range]").first.press("ArrowRight")
    page.locator(".ex-table summary").press("Enter")
    assert page.evaluate(OVERFLOW) == []
    found = (
        Axe()
        .run(page, context={"include": [".explorer"]}, options={"preload": False, "resultTypes": ["violations"]})
        .response
    )
    assert [v["id"] for v in found["violations"] if v["impact"] in ("serious", "critical")] == []
    blue = page.evaluate("getComputedStyle(document.querySelector('.explorer path.ex-blue')).stroke")
    assert blue == ("rgb(0, 114, 178)" if scheme == "light" else "rgb(98, 182, 236)")
    assert page.evaluate("document.getAnimations().length") == 0
    outline = page.evaluate(
        """() => { const s = document.querySelector(".explorer input[type=range]"); s.focus();
        return getComputedStyle(s).outlineStyle; }"""
    )
    assert outline == "solid"


@in_browser
@pytest.mark.parametrize("name", ["accounting", "curvature"])
def test_without_javascript_there_is_a_table(opened: Any, name: str) -> None:
    explorer = opened(name, java_script_enabled=False)
    assert explorer.page.locator(".explorer table").is_visible()
    assert explorer.page.locator(".explorer input").count() == 0


@in_browser
def test_paper_shows_the_state(opened: Any) -> None:
    explorer = opened("accounting", "sigma=2")
    explorer.page.emulate_media(media="print")
    assert explorer.page.get_by_text("2 times C").is_visible()
    assert explorer.page.locator(".ex-picture svg").is_visible()
    assert not explorer.page.locator(".ex-actions").is_visible()


def test_the_tool_refuses_what_it_does_not_know() -> None:
    with pytest.raises(SystemExit, match="unknown explorer fisher"):
        explorers.main(["fisher"])


def test_data_are_javascript_that_assigns(prv: dict[str, Any]) -> None:
    text = (explorers.STATIC / "explore_accounting.js").read_text()
    assert text.startswith("// Written by tools/explorers.py.\nwindow.exploreAccounting = {")
    assert json.loads(text[text.index("{") : text.rindex("}") + 1]) == prv
    assert len(prv["prv"]) == len(explorers.RATES) * len(explorers.NOISES) * len(explorers.UPDATES)
