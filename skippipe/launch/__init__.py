"""Where nodes come from: a launcher starts them and reports those that have ended.

`launcher` is the interface, with processes of this machine (forked by `fork_server`) and nodes that join by themselves;
`ray_actors` and `torchrun` are other ways to get nodes.
"""
