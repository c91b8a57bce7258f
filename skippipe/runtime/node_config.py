"""What a node must know to build its stage and take part: the job with everything settled."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from skippipe.errors import UserError
from skippipe.heartbeat import TIMEOUT_S
from skippipe.json_fields import Fields
from skippipe.model.lora import LoraConfig
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.skip_schedule import SkipSchedule
from skippipe.toml_config import from_table
from skippipe.value_ranges import HEARTBEAT_S, SEED, THREADS

if TYPE_CHECKING:
    from skippipe.data.batch_sampler import BatchSampler
    from skippipe.model.model_spec import ModelSpec


@dataclass(frozen=True)
class NodeConfig:
    plan: Plan
    config: dict[str, Any]
    """Of the model, as Hugging Face writes it."""
    seed: Annotated[int, SEED]
    learning: OptimConfig
    data_folder: str
    """The token file, as it is called on the coordinator's machine."""
    data_fingerprint: str
    device: str = "cpu"
    compiled: bool = False
    threads: Annotated[int, THREADS] = 1
    emulated: bool = False
    heartbeat_s: Annotated[float, HEARTBEAT_S] = TIMEOUT_S
    """Seconds without a heartbeat after which a node is declared dead."""
    rendezvous: str | None = None
    """host:port at which nodes meet, if a library averages."""
    recipe: SkipSchedule = field(default_factory=SkipSchedule)
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters, with all targets by name."""

    def spec(self) -> ModelSpec:
        from skippipe.model.model_spec import ModelSpec, config_from

        return ModelSpec(config_from(self.config), self.seed, self.lora)

    def sampler(self, folder: Path | None = None) -> BatchSampler:
        """The text, from here or from where this machine keeps it."""
        from skippipe.data.batch_sampler import BatchSampler
        from skippipe.data.token_file import TokenFile

        tokens = TokenFile.open(folder or Path(self.data_folder))
        if tokens.fingerprint != self.data_fingerprint:
            raise UserError(
                f"{tokens.folder}: other tokens ({tokens.fingerprint[:12]}) than the job's "
                f"({self.data_fingerprint[:12]}); copy the coordinator's folder here"
            )
        work = self.plan.workload
        return BatchSampler(
            tokens.ids, work.sequence_tokens, self.seed, self.plan.microbatches, work.samples_per_microbatch
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in ("plan", "learning", "recipe")}
        recipe = {name: value for name, value in asdict(self.recipe).items() if value is not None}
        plain["lora"] = asdict(self.lora)
        return {**plain, "plan": self.plan.to_json(), "learning": self.learning.to_json(), "recipe": recipe}

    @classmethod
    def from_json(cls, value: Any) -> NodeConfig:
        fields = Fields(value, "brief", of=cls)
        config = fields.take("config")
        if not isinstance(config, dict):
            raise UserError("brief.config: expected an object")
        node_config = cls(
            plan=Plan.from_json(fields.take("plan")),
            config=config,
            seed=fields.integer("seed"),
            learning=from_table(OptimConfig, fields.take("learning"), "brief.learning"),
            data_folder=fields.text("data_folder"),
            data_fingerprint=fields.text("data_fingerprint"),
            device=fields.text("device"),
            compiled=fields.flag("compiled"),
            threads=fields.integer("threads"),
            emulated=fields.flag("emulated"),
            heartbeat_s=fields.number("heartbeat_s"),
            rendezvous=fields.text("rendezvous") if fields.has("rendezvous") else fields.take("rendezvous"),
            recipe=from_table(SkipSchedule, fields.take("recipe"), "brief.recipe"),
            lora=from_table(LoraConfig, fields.take("lora"), "brief.lora"),
        )
        fields.close()
        return node_config
