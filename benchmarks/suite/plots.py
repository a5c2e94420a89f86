"""Pictures of the records that only a checkout makes. Knows records, not how they are measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.bench.plots import COLOURS, new_figure, save, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {
    "selective": "selective (after seams)",
    "selective_before": "selective (before seams)",
    "nothing": "nothing repaired",
}


def plot_error(record: dict[str, Any], folder: Path) -> list[Path]:
    """Error against speed-up: mean KL of all prompts over the time until the KV is ready."""
    figure, axes = new_figure(7.2, 4.6)
    for method, colour in COLOURS.items():
        results = [
            result for result in record["results"] if result["method"] == method and result["bits"] == 16
        ]
        if results:
            _draw_method(axes, results, _NAMES.get(method, method), colour)
    axes.set_yscale("log")
    axes.set_xlabel("speed-up of the time until the KV is ready, over full prefill")
    axes.set_ylabel("mean KL from full prefill, nats (lower is better)")
    axes.set_title(title(record, f"{record['settings']['prompts']} prompts"), loc="left", fontsize=9)
    axes.grid(visible=True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    return save(figure, record, folder)


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


def plot_reordered(record: dict[str, Any], folder: Path) -> list[Path]:
    """Documents in another order: error of the first token against its speed-up, ours beside others."""
    figure, axes = new_figure(7.2, 4.6)
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
        colour = COLOURS.get(line.split()[-1], COLOURS["nothing"])
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
    axes.set_title(title(record, what), loc="left", fontsize=8)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return save(figure, record, folder)


def plot_bytes(record: dict[str, Any], folder: Path) -> list[Path]:
    """Bytes against error: a point per way to quantize, the engine's own widths named large."""
    figure, axes = new_figure(7.2, 4.6)
    free_above: dict[str, float] = {}  # by bits: how far up its labels reach, in decades
    for name, error in sorted(record["errors"].items(), key=lambda item: float(item[1]["kl_mean"])):
        bits, _, other = name.partition(", ")
        colour = COLOURS["deviation"] if "per token" in name else COLOURS["random" if other else "guided"]
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
    axes.set_title(title(record, f"{record['settings']['prompts']} prompts"), loc="left", fontsize=9)
    axes.grid(visible=True, which="major", alpha=0.3)
    return save(figure, record, folder)
