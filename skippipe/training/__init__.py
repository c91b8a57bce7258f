"""Training: from a job file to a trained model.

job_config    the job file
train_job     all of `skippipe train`: output folder, plan, run, what is printed
build_run     text, model, plans and settings of a job, checked before any node is started
run           one run: starts nodes with a launcher, coordinates them, stores the model
backends      the engines: nodes as processes, as Ray actors, as virtual nodes; or one process without nodes
run_folder    the output folder: its id, its lock, what becomes of an earlier run
metrics       callbacks that record a run: files, TensorBoard, Prometheus
torchrun      the command that torchrun starts
reference     the same training in one process, to compare with
depth_growth  a trained model made deeper
"""
