"""SkipPipe: pipeline-parallel training in which every microbatch takes its own path.

The rooms, from the pure core outwards:

    cluster, workload   what goes in: machines and links; a model and a batch
    costs               both together as whole nanoseconds
    rules, dispatch     what a plan may do; who goes next on a node
    plan, check         what comes out, and the proof that it holds
    simulate            how long an iteration takes, and why
    planner/            how plans are found
    report/, cli/       how people see them
"""

__version__ = "0.1.0"
