"""The heartbeat timeout, and every wait that is a multiple of it.

A node that trains, serves or is profiled sends heartbeats; one that is silent for the timeout is declared dead. The
timeout is set by `survive.heartbeat_s` in a job file and by `--heartbeat` of serve and profile, and nodes learn it from
their configuration. Everything else that depends on it is a multiple of the timeout and stands here.
"""

from __future__ import annotations

TIMEOUT_S = 5.0
"""Seconds without a heartbeat after which a node is declared dead, unless the run sets another timeout."""
HEARTBEATS = 5
"""Heartbeats that a node sends within the timeout."""
BUILDING = 4.0
"""Timeouts without a heartbeat after which a node that builds its stage is declared dead: what it imports for that can
hold up all its threads, for long where many nodes start at once. One whose process ends is missed at once."""
PROFILING_TIMEOUT = 3.0
"""Timeouts without a heartbeat after which a node that is profiled is declared dead: its cores are all at work."""
HELD_UP = 0.5
"""Timeouts between two turns of an event loop after which the process itself was held up: silence of others in that
time proves nothing."""
SUSPECTED = 0.5
"""Timeouts without a heartbeat after which a node may be dead: a link to it that is reported down is not blamed yet."""
IDLE = 2.0
"""Timeouts in which no node computes and nothing arrives, after which a link is reported to be slow."""
REPAIRED_ITERATION = 4.0
"""Timeouts, or promised iterations if that is longer, in which nothing arrives after a node was lost in an iteration:
then the iteration starts over."""
RESEND = 2.0
"""Timeouts after which a node repeats a message that was not answered."""
LINK_PROBES = 5
"""Probes of a link within the timeout."""
PROBE_UNANSWERED = 0.5
"""Timeouts after which a probe of a link counts as unanswered."""
LINK_DOWN = 0.75
"""Timeouts without an answer to a probe after which a link is reported down."""
LINK_WATCHED = 4.0
"""Timeouts for which a link is probed after it was last needed: a lane that serves needs it for moments, again and
again."""
DIAL = 0.5
"""Timeouts after which a peer that does not answer is asked to call back."""
