"""What a run says before it begins: notes on its job, progress of its plans, and what is refused at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from skippipe.errors import UserError
from skippipe.model.model_spec import ModelSpec, check_device
from skippipe.planner.problem import PlanRequest
from skippipe.skip_schedule import SkipSchedule
from skippipe.training.backends import BACKENDS
from skippipe.training.build_run import build_run, warn_uncounted
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import BatchConfig, ComputeConfig, DataConfig, PipelineConfig, TransportConfig
from skippipe.training.run import RunOptions
from skippipe.training.train_job import run_job, start_notes
from tests.helpers.model_folders import checkpoint_in
from tests.helpers.models import SIZES


def test_notes_before_a_run_on_what_the_job_may_not_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def notes(listen: str, peers: str = "", device: str = "cpu", *, here: bool = True) -> list[str]:
        transport = TransportConfig(listen=listen, peers=peers, key=peers and "coordinator.key")
        job = replace(JobConfig(), transport=transport, compute=ComputeConfig(device))
        return list(start_notes(job, nodes_here=here and not peers, listens=True))

    assert notes("127.0.0.1:0") == notes("[::]:5555", "peers.json") == []
    assert notes("127.0.0.1:0", "peers.json") == [
        "warning: transport.listen: nodes on other machines cannot reach 127.0.0.1:0, unless by a tunnel; set "
        'transport.listen = "[::]:5555"'
    ]
    (warned,) = notes("0.0.0.0:5555")
    assert warned.endswith("is 0.0.0.0:5555, but without transport.peers all nodes are started on this machine")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert notes("127.0.0.1:0") == [
        'note: this machine has 2 GPUs and the job uses none; to use them: [compute] device = "cuda"'
    ]
    assert notes("127.0.0.1:0", device="cuda") == notes("127.0.0.1:0", device="cpu:2") == []
    assert notes("127.0.0.1:0", here=False) == notes("[::]:5555", "peers.json") == []


def test_why_there_is_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(UserError, match=r"^device 'cuda': torch \S+ is built without CUDA; install a build with CUDA"):
        check_device("cuda")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(UserError, match=r"^device 'cuda:1': torch \S+ is built for GPUs and sees none on this machine"):
        check_device("cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"^device 'cuda:1': this machine has 1 CUDA devices; use another, or cpu$"):
        check_device("cuda:1")


def test_progress_says_which_plan_it_is_of_how_many(tmp_path: Path) -> None:
    heard: list[str] = []
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the quick brown fox jumps over {each} dogs\n" for each in range(300)))
    request = replace(
        PlanRequest(seed=0, budget_s=0.2, changes=300), progress=lambda what, share, best_s: heard.append(what)
    )
    job = JobConfig(
        output=str(tmp_path / "run"),
        iterations=5,
        cluster="regions:4",
        data=DataConfig([str(text)], vocabulary=300, folder=str(tmp_path / "tokens")),
        batch=BatchConfig(sequence=16, samples=1),
        pipeline=PipelineConfig(stages=3, max_slots=2),
        recipe=SkipSchedule(skip="2 x 1/3 + 0"),
    )
    build_run(job, request=request)
    plans = list(dict.fromkeys(what.partition(":")[0] for what in heard if what.startswith("plan ")))
    assert plans == ["plan 1 of 2 (2 of 3 stages)", "plan 2 of 2 (3 of 3 stages)"]
    assert "plan 2 of 2 (3 of 3 stages): searching" in heard


def test_a_run_that_is_over_is_refused_before_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any, **__: Any) -> None:
        raise AssertionError("too early")

    monkeypatch.setattr("skippipe.training.build_run.prepare", prepare)
    job, resumed = replace(JobConfig(), output=str(tmp_path / "run")), RunOptions(resumed=True)
    with pytest.raises(UserError, match="no sound checkpoint to resume from"):
        build_run(job, options=resumed)
    checkpoint_in(tmp_path / "run")  # of 7 iterations
    with pytest.raises(UserError, match="000007: has 7 iterations already, and the job wants 7: set a higher number"):
        build_run(replace(job, iterations=7), options=resumed)
    with pytest.raises(AssertionError, match="too early"):
        build_run(replace(job, iterations=8), options=resumed)
    with pytest.raises(UserError, match="--resume: one process does not go on from checkpoints"):
        run_job(replace(job, iterations=8), BACKENDS["one-process"], resumed=True)


def test_parameters_that_plans_do_not_count_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    mixture = {"num_experts": 4, "moe_intermediate_size": 24}
    for dense_layers in ([], [0]):
        config = AutoConfig.for_model("qwen2_moe", **SIZES, **mixture, mlp_only_layers=dense_layers)
        config.shared_expert_intermediate_size = 48
        warn_uncounted(ModelSpec(config))
    warn_uncounted(ModelSpec(AutoConfig.for_model("gemma2", **SIZES)))
    assert [record.getMessage()[:48] for record in caplog.records] == [
        "plans count 0.0917 million parameters where the ",
        "the attention of gemma2 models holds the scores ",
    ]
