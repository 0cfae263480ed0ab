"""Training programs that the benchmarks start as processes: `python -m benchmarks.loops.PROGRAM LOOP --record HOW ...`.

records     what a loop tells of its steps, and to whom; standard library only
library     loops on elasticdl's library, with PyTorch
plain       the loop of every tutorial: alone, elastic, with DDP, Horovod or Gloo
trainers    Lightning and Hugging Face's Trainer: alone, elastic, with DDP
with_keras  loops on Keras, `fit`, and Horovod with TensorFlow
peers       loops for torchrun, horovodrun and torchft

A job's fork server imports what its program mentions anywhere, so programs that differ in that are separate.
"""
