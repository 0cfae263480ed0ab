"""A script in the style of Horovod's elastic examples for TensorFlow 2; nothing in it is ours."""

import os
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
inputs = np.random.RandomState(1).randn(512, 8).astype("float32")
targets = inputs.sum(1, keepdims=True)

tf.random.set_seed(1)
hidden = tf.Variable(tf.random.normal((8, 16)))
out = tf.Variable(tf.random.normal((16, 1)))
weights = [hidden, out]


@hvd.elastic.run
def train(state):
    while not state.enough:
        rows = np.arange(8) * hvd.size() + hvd.rank() + 8 * state.batches
        x, y = inputs[rows % 512], targets[rows % 512]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.relu(x @ hidden) @ out - y) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(state.rate * gradient)
        state.batches += 1
        if state.batches % 2:
            state.check_host_updates()
        else:
            print(f"commit {state.batches} size {hvd.size()} loss {float(loss):.6f}", flush=True)
            # Rank 0 says so for all.
            state.enough = hvd.broadcast_object(not os.path.exists(os.environ["TEST_GO_ON_WHILE"]), root_rank=0)
            state.commit()
        time.sleep(0.1)


def on_reset():
    state.rate = 0.001 * hvd.size()


state = hvd.elastic.TensorFlowState(weights, rate=0.001 * hvd.size(), batches=0, enough=False)
state.register_reset_callbacks([on_reset])
train(state)
print(f"done {state.batches} rank {hvd.rank()} weight {float(tf.reduce_sum(hidden)):.6f}", flush=True)
