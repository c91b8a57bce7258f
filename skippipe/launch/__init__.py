"""Where nodes come from: a launcher starts them and reports those that have ended.

`launcher` is the interface, with nodes that join by themselves; every other module is a way to get nodes: `local`
(processes of this machine, forked by `fork_server`), `ray_actors` and `torchrun`.
"""
