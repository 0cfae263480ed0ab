"""A script in the style of Horovod's elastic examples for TensorFlow 2 and Keras; nothing in it is ours."""

import os
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
inputs = np.random.RandomState(1).randn(512, 8).astype("float32")
targets = inputs.sum(1, keepdims=True)

model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.Adam(0.01 * hvd.size())


@tf.function(autograph=False)  # with nothing to convert it would only take seconds to trace
def train_one_batch(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def batch(number):
    start = 8 * (number * hvd.size() + hvd.rank()) % 512
    return tf.constant(inputs[start : start + 8]), tf.constant(targets[start : start + 8])


def enough():
    """Rank 0 says so for all."""
    return hvd.broadcast_object(not os.path.exists(os.environ["TEST_GO_ON_WHILE"]), root_rank=0)


@hvd.elastic.run
def train(state):
    while not state.enough:
        loss = train_one_batch(*batch(state.batch))
        state.batch += 1
        if state.batch % 2 == 0:
            print(f"commit {state.batch} size {hvd.size()} loss {float(loss):.6f}", flush=True)
            state.enough = enough()
            state.commit()
        time.sleep(0.1)


def on_reset():
    optimizer.lr.assign(0.01 * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, enough=False)
state.register_reset_callbacks([on_reset])
train(state)
weight = float(tf.reduce_sum(model.trainable_variables[0]))
print(f"done {state.batch} rank {hvd.rank()} weight {weight:.6f}", flush=True)
