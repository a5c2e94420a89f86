"""What benchmarks' records have in common: where it was run, the spread of measurements, targets, the file.

Knows no benchmark.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import kvboost


def head_of(benchmark: str, engine: Any, model: str, settings: Any) -> dict[str, Any]:
    """What a record begins with; made before anything is measured."""
    return {
        "benchmark": benchmark,
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine_record(engine.model.get_input_embeddings().weight.device),
        "settings": asdict(settings),
    }


def machine_record(device: torch.device) -> dict[str, Any]:
    """The machine, the versions, the threads and the date."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "load_average": round(psutil.getloadavg()[0], 2),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "kvboost": kvboost.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def write_record(record: dict[str, Any], folder: Path) -> Path:
    """Write `record` as `<benchmark>-<device type>.json` into `folder`, over an earlier one."""
    device = torch.device(record["machine"]["device"]).type
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['benchmark']}-{device}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The middle of at least one measurement, and how far they lie apart, rounded to hundredths."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
    return {
        "median": round(statistics.median(values), 2),
        "low": round(min(values), 2),
        "quartile_1": round(quartiles[0], 2),
        "quartile_3": round(quartiles[2], 2),
        "high": round(max(values), 2),
        "count": len(values),
    }


def pair_ratios(ours: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """How much longer ours took than the others, of measurements in pairs."""
    return {
        "ratio_of_medians": round(statistics.median(ours) / statistics.median(others), 3),
        "median_of_pair_ratios": round(
            statistics.median(a / b for a, b in zip(ours, others, strict=True)), 3
        ),
    }


def at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    """A target, and whether it was reached."""
    return {"name": name, "value": round(value, 3), "at_least": limit, "met": value >= limit}


def at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    """A target, and whether it was reached."""
    return {"name": name, "value": round(value, 3), "at_most": limit, "met": value <= limit}
