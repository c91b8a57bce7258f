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
from skippipe.value_ranges import COUNT, HEARTBEAT_S, SEED, THREADS

if TYPE_CHECKING:
    from skippipe.data.batch_sampler import BatchSampler
    from skippipe.model.model_spec import ModelSpec


@dataclass(frozen=True)
class HeldOut:
    """Samples that are evaluated while training, and not trained on."""

    microbatches: Annotated[int, COUNT]
    """Microbatches of one evaluation; always the same ones."""
    windows: Annotated[int, COUNT] = 0
    """Windows at the end of the training text that are held out; 0: they are of a text of their own."""
    folder: str = ""
    """The token file of that text: a folder in the one of the training text."""
    fingerprint: str = ""


@dataclass(frozen=True)
class NodeConfig:
    plan: Plan
    config: dict[str, Any]
    """Configuration of the model, as Hugging Face writes it."""
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
    held_out: HeldOut | None = None
    packing: bool = True
    """Whether a sample may hold several conversations."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters, with all targets by name."""

    def spec(self) -> ModelSpec:
        from skippipe.model.model_spec import ModelSpec, config_from

        trained = self.recipe.bridges, self.recipe.adapters, self.recipe.repeats
        return ModelSpec(config_from(self.config), self.seed, self.lora, *trained)

    def sampler(self, folder: Path | None = None) -> BatchSampler:
        """The text that is trained on, from here or from where this machine keeps it."""
        found = self._whole(folder or Path(self.data_folder), self.data_fingerprint)
        held_out = self.held_out.windows if self.held_out else 0
        return found.part(range(found.windows - held_out), found.microbatches) if held_out else found

    def held_out_sampler(self, folder: Path | None = None) -> BatchSampler | None:
        """The samples that are held out; None: there are none."""
        held_out, place = self.held_out, folder or Path(self.data_folder)
        if held_out is None:
            return None
        if held_out.folder:
            found = self._whole(place / held_out.folder, held_out.fingerprint)
            return found.part(range(found.windows), held_out.microbatches)
        found = self._whole(place, self.data_fingerprint)
        return found.part(range(found.windows - held_out.windows, found.windows), held_out.microbatches)

    def _whole(self, folder: Path, fingerprint: str) -> BatchSampler:
        from skippipe.data.batch_sampler import BatchSampler, ConversationSampler
        from skippipe.data.token_file import TokenFile

        tokens = TokenFile.open(folder)
        if tokens.fingerprint != fingerprint:
            raise UserError(
                f"{tokens.folder}: other tokens ({tokens.fingerprint[:12]}) than the job's "
                f"({fingerprint[:12]}); copy the coordinator's folder here"
            )
        work = self.plan.workload
        sizes = work.sequence_tokens, self.seed, self.plan.microbatches, work.samples_per_microbatch
        if tokens.marks is None:
            return BatchSampler(tokens.ids, *sizes)
        return ConversationSampler(tokens.ids, tokens.marks, *sizes, padding=tokens.end_id, packing=self.packing)

    def to_json(self) -> dict[str, Any]:
        nested = ("plan", "learning", "recipe", "held_out")
        plain = {name: value for name, value in vars(self).items() if name not in nested}
        recipe = {name: value for name, value in asdict(self.recipe).items() if value is not None}
        held_out = asdict(self.held_out) if self.held_out else None
        plan, learning, lora = self.plan.to_json(), self.learning.to_json(), asdict(self.lora)
        more = {"plan": plan, "learning": learning, "recipe": recipe, "held_out": held_out, "lora": lora}
        return {**plain, **more}

    @classmethod
    def from_json(cls, value: Any) -> NodeConfig:
        fields = Fields(value, "node_config", of=cls)
        config = fields.take("config")
        if not isinstance(config, dict):
            raise UserError("node_config.config: expected an object")
        held_out = fields.take("held_out")
        nested: dict[str, Any] = {
            "plan": Plan.from_json(fields.take("plan")),
            "learning": from_table(OptimConfig, fields.take("learning"), "node_config.learning"),
            "recipe": from_table(SkipSchedule, fields.take("recipe"), "node_config.recipe"),
            "held_out": from_table(HeldOut, held_out, "node_config.held_out") if held_out is not None else None,
            "lora": from_table(LoraConfig, fields.take("lora"), "node_config.lora"),
        }
        node_config = cls(config=config, **nested, **fields.values())
        fields.close()
        return node_config
