"""What a coordinator is waiting for."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    JOINING = "to join"
    PREPARING = "to be ready"
    TRAINING = "to average gradients"
    PAUSED = "to take the places of those who are gone"
    STEPPING = "to take the last step"
    COLLECTING = "to send its weights"
    REUNITING = "to come back to a coordinator that was started again"
    DONE = "for nothing"
    FAILED = "for nothing any more"
