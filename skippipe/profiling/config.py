"""The configuration that a node gets to be measured: names of all nodes, what to compute, and how thoroughly."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.heartbeat import TIMEOUT_S
from skippipe.json_fields import Fields
from skippipe.profiling.link_probe import ProbeSettings
from skippipe.runtime.node.interfaces import PROFILING
from skippipe.toml_config import from_table
from skippipe.value_ranges import HEARTBEAT_S, THREADS, WAIT_S
from skippipe.workload import Workload


@dataclass(frozen=True)
class ProfilingConfig:
    names: tuple[str, ...]
    """All nodes; a node's number is its place here."""
    config: dict[str, Any]
    """The model's configuration, as Hugging Face writes it."""
    workload: Workload
    """The size of a microbatch, and how it is computed."""
    device: str = "cpu"
    compiled: bool = False
    threads: Annotated[int, THREADS] = 1
    compute_s: Annotated[float, WAIT_S] = 1.0
    """Seconds for the passes that are measured; the one that runs then is the last."""
    effort: ProbeSettings = field(default_factory=ProbeSettings)
    emulated: Cluster | None = None
    """Links are emulated as in this cluster of the same nodes; none: they are as they are."""
    heartbeat_s: Annotated[float, HEARTBEAT_S] = TIMEOUT_S
    """Seconds without a heartbeat after which a node is declared dead."""

    @property
    def number(self) -> dict[str, int]:
        """Node → its number."""
        return {name: number for number, name in enumerate(self.names)}

    @property
    def work(self) -> str:
        """What nodes compute, in words: their speed depends on it."""
        work = self.workload
        how = [work.compute_dtype] + ["recomputed"] * work.activation_checkpointing + ["compiled"] * self.compiled
        return f"{work.model.name}, {work.samples_per_microbatch} × {work.sequence_tokens} tokens, {', '.join(how)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": PROFILING,
            **vars(self),
            "names": list(self.names),
            "workload": self.workload.to_json(),
            "effort": asdict(self.effort),
            "emulated": self.emulated.to_json() if self.emulated else None,
        }

    @classmethod
    def from_json(cls, value: Any) -> ProfilingConfig:
        fields = Fields(value, "brief", of=cls)
        fields.text("kind", (PROFILING,))
        config = fields.take("config")
        if not isinstance(config, dict):
            raise UserError("brief.config: expected an object")
        emulated = fields.take("emulated")
        node_config = cls(
            names=tuple(str(name) for name in fields.items("names")),
            config=config,
            workload=Workload.from_json(fields.take("workload")),
            device=fields.text("device"),
            compiled=fields.flag("compiled"),
            threads=fields.integer("threads"),
            compute_s=fields.number("compute_s"),
            effort=from_table(ProbeSettings, fields.take("effort"), "brief.effort"),
            emulated=Cluster.from_json(emulated) if emulated is not None else None,
            heartbeat_s=fields.number("heartbeat_s"),
        )
        fields.close()
        return node_config
