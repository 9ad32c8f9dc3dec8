"""Settings that may change in a running attempt: which they are, and the configuration with them."""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import Any

from elastic.config import Config, ConfigError, parse
from elastic.config_sections import Policies

# What may change in a running attempt: what the controller alone reads, at each decision.
LIVE_KEYS = (
    "checkpoint.interval_steps",
    *(
        f"control.{name}"
        for name in (
            "silence_s",
            "start_wait_s",
            "hosts_wait_s",
            "start_timeout_s",
            "restore_timeout_s",
            "drain_timeout_s",
            "upload_timeout_s",
            "grow_wait_s",
            "failures_without_progress_max",
        )
    ),
    *(f"policies.{name}" for name in Policies.model_fields),
)


@lru_cache(maxsize=16)
def with_settings(config: Config, settings: tuple[tuple[str, Any], ...]) -> Config:
    """`config` with each (key, value) of a running attempt; ConfigError: not a live key, or a value that can't be."""
    raw = config.model_dump()
    for key, value in settings:
        if key not in LIVE_KEYS:
            close = difflib.get_close_matches(key, LIVE_KEYS, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; these can: {', '.join(LIVE_KEYS)}"
            raise ConfigError(f"{key} can't change while the run goes on{hint}")
        section, name = key.split(".")
        raw[section][name] = value
    return parse(raw, source="set")
