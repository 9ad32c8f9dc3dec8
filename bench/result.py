"""How every benchmark ends: its figures beside their goals, then one JSON line."""

from __future__ import annotations

import json
from collections.abc import Mapping


def show(bench: str, metrics: Mapping[str, float], goals: Mapping[str, float]) -> None:
    """`goals`: by key, for whoever reads the table; most figures have none."""
    for key, value in metrics.items():
        goal = f"  (goal {goals[key]})" if key in goals else ""
        print(f"{key:28} {value:10.3f}{goal}")
    print(json.dumps({"bench": bench, "metrics": {key: round(value, 4) for key, value in metrics.items()}}))
