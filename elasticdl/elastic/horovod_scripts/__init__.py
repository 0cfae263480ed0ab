"""Runs scripts that were written for Horovod's own elastic mode, unchanged, under our master.

`startup` gets into the script's process, `patches` puts our functions in place of a few of Horovod's, `script_worker` is
what they act on: this process's part in the job. Only ``startup`` is imported from outside, and by Python itself; a
script that uses `elasticdl.elastic` goes on getting Horovod's own functions. Nothing here imports Horovod or a
framework: modules come in as arguments.
"""
