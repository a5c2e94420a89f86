"""Records as pictures, SVG and PNG. The only module that knows matplotlib, which is optional.

Knows records, not how they are measured.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "guided": "#0b7a75",
    "deviation": "#d1495b",
    "random": "#8d8d8d",
    "selective": "#edae49",
    "selective_before": "#b5838d",
    "nothing": "#30343f",
}
_NAMES = {
    "selective": "selective (after seams)",
    "selective_before": "selective (before seams)",
    "nothing": "nothing repaired",
}


def require_matplotlib() -> None:
    """Raise where no plot could be drawn: better before a long run than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise KVBoostError(
            'plots need matplotlib: pip install "kvboost[bench]", or leave the plot out with --no-plot'
        )


def plot_error(record: dict[str, Any], folder: Path) -> list[Path]:
    """Error against speed-up: mean KL of all prompts over the time until the KV is ready."""
    figure, axes = _figure(7.2, 4.6)
    for method, colour in _COLOURS.items():
        results = [
            result for result in record["results"] if result["method"] == method and result["bits"] == 16
        ]
        if results:
            _draw_method(axes, results, _NAMES.get(method, method), colour)
    axes.set_yscale("log")
    axes.set_xlabel("speed-up of the time until the KV is ready, over full prefill")
    axes.set_ylabel("mean KL from full prefill, nats (lower is better)")
    axes.set_title(_title(record, f"{record['settings']['prompts']} prompts"), loc="left", fontsize=9)
    axes.grid(visible=True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    return _save(figure, record, folder)


def _draw_method(axes: Axes, results: list[dict[str, Any]], name: str, colour: str) -> None:
    """A line over the ratios, each point with its ratio and the interval of its mean."""
    points = [(result["ratio"], result["groups"]["overall"]) for result in results]
    points = [(ratio, point) for ratio, point in points if point["kl_mean"] > 0]  # zero has no logarithm
    if not points:
        return
    means = [point["kl_mean"] for _, point in points]
    below = [point["kl_mean"] - max(point["kl_mean_low"], point["kl_mean"] / 100) for _, point in points]
    above = [point["kl_mean_high"] - point["kl_mean"] for _, point in points]
    axes.errorbar(
        [point["speedup"] for _, point in points],
        means,
        yerr=[[max(value, 0.0) for value in side] for side in (below, above)],
        marker="o",
        markersize=4,
        capsize=2,
        elinewidth=0.8,
        color=colour,
        label=name,
    )
    for ratio, point in points:
        if ratio is not None:
            axes.annotate(
                f"{ratio:.0%}",
                (point["speedup"], point["kl_mean"]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )


def plot_first_tokens(record: dict[str, Any], folder: Path) -> list[Path]:
    """A bar per contestant: median time to the first token with its range."""
    contestants = record["contestants"]
    figure, axes = _figure(7.2, 0.5 * len(contestants) + 1.2)
    names = list(contestants)
    medians = [contestants[name]["ttft_ms"]["median"] / 1e3 for name in names]
    lows = [contestants[name]["ttft_ms"]["low"] / 1e3 for name in names]
    highs = [contestants[name]["ttft_ms"]["high"] / 1e3 for name in names]
    errors = [
        [middle - low for middle, low in zip(medians, lows, strict=True)],
        [high - middle for middle, high in zip(medians, highs, strict=True)],
    ]
    colours = [_COLOURS.get(name.split()[0], "#b0b7c3") for name in names]
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
    axes.set_title(_title(record, what), loc="left", fontsize=9)
    return _save(figure, record, folder)


def plot_reordered(record: dict[str, Any], folder: Path) -> list[Path]:
    """Documents in another order: error of the first token against its speed-up, ours beside others."""
    figure, axes = _figure(7.2, 4.6)
    reordered = record["reordered"]
    contestants = reordered["contestants"]
    plain_ms = contestants["plain"]["ttft_ms"]["median"]
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for name, found in contestants.items():
        if found["first_token_kl"]:  # plain has none, and zero has no logarithm
            about = record["peers"][name]
            line = f"kvboost, {about['selector']}" if "selector" in about else about["label"]
            text = f"{about['ratio']:.0%}" if "ratio" in about else ""
            point = (plain_ms / found["ttft_ms"]["median"], found["first_token_kl"], text)
            lines.setdefault(line, []).append(point)
    for line, points in lines.items():
        colour = _COLOURS.get(line.split()[-1], _COLOURS["nothing"])
        x, y, _ = zip(*points, strict=True)
        axes.plot(x, y, marker="o", markersize=5, color=colour, label=line)
        for speedup, error, text in points:
            axes.annotate(
                text, (speedup, error), xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour
            )
    axes.axvline(1.0, color="#8d8d8d", linewidth=0.8, linestyle="--", label="full prefill, no error")
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.set_xlabel("speed-up of the first token over full prefill")
    axes.set_ylabel("mean KL of the first token, nats (lower is better)")
    prompts = record["settings"]["reordered"]
    what = f"{prompts} prompts of {reordered['documents']} documents in another order"
    axes.set_title(_title(record, what), loc="left", fontsize=8)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return _save(figure, record, folder)


def plot_bytes(record: dict[str, Any], folder: Path) -> list[Path]:
    """Bytes against error: a point per way to quantize, the engine's own widths named large."""
    figure, axes = _figure(7.2, 4.6)
    free_above: dict[str, float] = {}  # by bits: how far up its labels reach, in decades
    for name, error in sorted(record["errors"].items(), key=lambda item: float(item[1]["kl_mean"])):
        bits, _, other = name.partition(", ")
        colour = _COLOURS["deviation"] if "per token" in name else _COLOURS["random" if other else "guided"]
        mean = max(error["kl_mean"], 1e-9)
        axes.errorbar(
            error["bytes_of_float16"],
            mean,
            yerr=[[max(mean - error["kl_mean_low"], 0.0)], [max(error["kl_mean_high"] - mean, 0.0)]],
            marker="." if other else "o",
            capsize=2,
            elinewidth=0.8,
            color=colour,
        )
        height = max(math.log10(mean), free_above.get(bits, -9.0)) if other else math.log10(mean)
        axes.annotate(
            name,
            (error["bytes_of_float16"], mean),
            xytext=(error["bytes_of_float16"] + (0.01 if other else -0.01), 10**height),
            textcoords="data",
            ha="left" if other else "right",
            va="center",
            fontsize=7 if other else 10,
            color=colour,
        )
        if other:
            free_above[bits] = height + 0.11
    axes.set_yscale("log")
    axes.set_xlim(0.22, 0.72)
    axes.set_xlabel("bytes of a whole chunk, against float16")
    axes.set_ylabel("mean KL from unquantized reuse, nats (lower is better)")
    axes.set_title(_title(record, f"{record['settings']['prompts']} prompts"), loc="left", fontsize=9)
    axes.grid(visible=True, which="major", alpha=0.3)
    return _save(figure, record, folder)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _title(record: dict[str, Any], what: str) -> str:
    machine = record["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{record['model']}, {record['dtype']}, {what}, {where}"


def _save(figure: Figure, record: dict[str, Any], folder: Path) -> list[Path]:
    """`<benchmark>-<device type>` as SVG and PNG; the same record gives the same SVG."""
    from matplotlib import rc_context

    device = torch.device(record["machine"]["device"]).type
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{record['benchmark']}-{device}.{kind}" for kind in ("svg", "png")]
    with rc_context({"svg.hashsalt": "kvboost"}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths
