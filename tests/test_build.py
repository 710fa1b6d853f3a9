"""What the build does to the site's pictures."""

import numpy as np
from PIL import Image

from tools import build


def test_plots_lose_bytes_and_nothing_that_can_be_seen(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(dpi=120)
    for k in range(7):
        ax.plot(np.sin(np.linspace(0, 9 + k, 400)), lw=1 + k / 2)
    fig.savefig(tmp_path / "plot.png", dpi=120)  # said here too: the book's style asks for more
    plt.close(fig)
    before, size = Image.open(tmp_path / "plot.png").convert("RGB"), (tmp_path / "plot.png").stat().st_size
    build.lighten(tmp_path)
    after = Image.open(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size < 0.6 * size
    assert round(after.info["dpi"][0]) == 120  # so that it is shown in the same size
    difference = np.abs(np.asarray(before, dtype=int) - np.asarray(after.convert("RGB"), dtype=int))
    assert (difference.max(-1) > 32).mean() < 0.002  # a few pixels at the edges of lines
    assert difference.mean() < 0.5
    again = (tmp_path / "plot.png").read_bytes()
    build.lighten(tmp_path)
    assert (tmp_path / "plot.png").read_bytes() == again
    assert list(tmp_path.iterdir()) == [tmp_path / "plot.png"]


def test_what_is_see_through_stays(tmp_path):
    path = tmp_path / "icon.png"
    Image.new("RGBA", (40, 40), (200, 10, 10, 90)).save(path)
    content = path.read_bytes()
    build.lighten(tmp_path)
    assert path.read_bytes() == content
