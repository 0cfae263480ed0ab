"""What runs on a cluster; each experiment is one command, `python -m benchmarks.experimentN`.

options      the command line, and how it ends
lab          a cluster, a namespace of it, jobs in it; all of it removed at the end
training     trainings: submitting several, following one, what became of it
pods         who has which GPUs, and when things happened to each pod, from a watch
gang         a scheduler that places all pods of a group or none, for a cluster that has none
measures     numbers from GPUs over time; pure
artefacts    what stays in --out
figures      the plots
zoo          the models, with a fixed time per sample where a GPU is simulated
serving, convergence            experiments 2 and 3
"""
