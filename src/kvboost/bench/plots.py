"""Records as pictures, SVG and PNG. The only module that knows matplotlib, which is optional.

Knows records, not how they are measured.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "guided": "#0b7a75",
    "deviation": "#d1495b",
    "random": "#8d8d8d",
    "selective": "#edae49",
    "selective_before": "#b5838d",
    "nothing": "#30343f",
}


def require_matplotlib() -> None:
    """Raise where no plot could be drawn: better before a long run than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise KVBoostError(
            'plots need matplotlib: pip install "kvboost[bench]", or leave the plot out with --no-plot'
        )


def plot_first_tokens(record: dict[str, Any], folder: Path) -> list[Path]:
    """A bar per contestant: median time to the first token with its range."""
    contestants = record["contestants"]
    figure, axes = new_figure(7.2, 0.5 * len(contestants) + 1.2)
    names = list(contestants)
    medians, lows, highs = (
        [contestants[name]["ttft_ms"][which] / 1e3 for name in names] for which in ("median", "low", "high")
    )
    errors = [
        [middle - low for middle, low in zip(medians, lows, strict=True)],
        [high - middle for middle, high in zip(medians, highs, strict=True)],
    ]
    colours = [COLOURS.get(name.split()[0], "#b0b7c3") for name in names]
    axes.barh(names, medians, xerr=errors, color=colours, height=0.65, error_kw={"elinewidth": 0.8})
    for row, name in enumerate(names):
        label = f"{medians[row]:.2f} s, {contestants[name]['speedup']:.1f} x"
        axes.annotate(
            label,
            (max(highs[row], medians[row]), row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.invert_yaxis()
    axes.set_xlim(0, max(highs) * 1.22)
    axes.set_xlabel("time to the first token, seconds (median and range)")
    tokens = contestants[names[0]]["prompt_tokens"]
    what = f"{record['settings']['documents']} documents in another order, {tokens:,} tokens"
    axes.set_title(title(record, what), loc="left", fontsize=9)
    return save(figure, record, folder)


def plot_right_answers(record: dict[str, Any], folder: Path) -> list[Path]:
    """Right answers against the speed-up of the first token, a point per mode and ratio."""
    figure, axes = new_figure(7.2, 4.2)
    rows = record["rows"]
    kinds = {"baseline": "nothing", "prefix_cache": "deviation", "chunk_kv_reuse": "guided"}
    approximate = [row for row in rows if row["ratio"] is not None]
    axes.plot(
        [row["speedup"] for row in approximate],
        [100 * row["accuracy"] for row in approximate],
        color=COLOURS["guided"],
        linewidth=0.8,
    )
    for row in rows:
        label = row["mode"] if row["ratio"] is None else f"{row['mode']}, {row['ratio']:.0%}"
        point = (row["speedup"], 100 * row["accuracy"])
        axes.plot(*point, marker="o", color=COLOURS[kinds[row["mode"]]])
        below = row["mode"] == "prefix_cache"  # it stands where BASELINE does
        axes.annotate(
            f"{label} ({row['right']} of {row['questions']})",
            point,
            xytext=(6, -12 if below else 6),
            textcoords="offset points",
            fontsize=8,
        )
    axes.axhline(100 * rows[0]["accuracy"], color="#8d8d8d", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, max(row["speedup"] for row in rows) * 1.5)
    axes.set_ylim(0, 105)
    axes.set_xlabel("speed-up of the first token over BASELINE (median of all questions)")
    axes.set_ylabel("right answers, %")
    what = f"{record['questions']} questions, documents read {record['read']}"
    axes.set_title(title(record, what), loc="left", fontsize=8)
    axes.grid(visible=True, which="major", alpha=0.3)
    return save(figure, record, folder)


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure in inches, without a frame at the top and on the right."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def title(record: dict[str, Any], what: str) -> str:
    """The model, what was measured, and the machine."""
    machine = record["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{record['model']}, {record['dtype']}, {what}, {where}"


def save(figure: Figure, record: dict[str, Any], folder: Path) -> list[Path]:
    """`<benchmark>-<device type>` as SVG and PNG; the same record gives the same SVG."""
    from matplotlib import rc_context

    device = torch.device(record["machine"]["device"]).type
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{record['benchmark']}-{device}.{kind}" for kind in ("svg", "png")]
    with rc_context({"svg.hashsalt": "kvboost"}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths
