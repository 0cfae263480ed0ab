"""What the published experiments have in common; each of them is one command, `python -m benchmarks.experimentN`.

options     the command line, and how it ends
lab         a cluster, a namespace of it, jobs in it; all of it removed at the end
gang        a scheduler that places all pods of a group or none, for a cluster that has none
series      GPUs in use over time, from a watch of the pods
measures    numbers from a series; pure
artefacts   what stays in --out
figures     the plots
zoo         the models, with a fixed time per sample where a GPU is simulated
"""
