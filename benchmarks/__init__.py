"""Measurements, each a command `python -m benchmarks.NAME`; docs/benchmarks.md and docs/experiments.md say what they have found.

harness      summaries, facts about the machine, results as JSON lines, tables, and the parser of all commands
processes    processes that a benchmark starts, and what it waits for
job          an elasticdl job on this machine, and its journal
steps        pauses, and steps lost or made twice, from step logs
ladders      loops that are measured against each other
simulated    workers that only speak with the master
loops        the training programs of all these
peers        other elastic frameworks behind one port
experiments  what runs on a cluster: the lab, jobs in it, who has which GPUs
storm        real processes under a storm of disturbances
faults       what hangs and what is slow, planted

They start real jobs and read what these leave behind (journals, step logs). Nothing in the package `elasticdl` imports this.
"""
