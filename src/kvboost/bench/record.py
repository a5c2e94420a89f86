"""What every benchmark's record says about where it was run, and how it gets into a file.

Knows no benchmark.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import kvboost


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
