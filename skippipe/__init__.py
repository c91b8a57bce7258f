"""SkipPipe: pipeline-parallel training in which every microbatch takes its own path.

From the pure core outwards:

    cluster, workload       what goes in: machines and links; a model and a batch
    cost_model              both together as whole nanoseconds
    constraints, dispatch   what a plan may do; which task goes next on a node
    plan, validate          what comes out, and the proof that it holds
    simulator               how long an iteration takes, and why
    planner/                how plans are found
    report/, cli/           how people see them
"""

__version__ = "0.1.0"
