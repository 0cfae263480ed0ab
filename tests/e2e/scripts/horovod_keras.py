"""A script in the style of Horovod's elastic examples for Keras: `fit` with Horovod's callbacks; nothing in it is ours."""

import os
import time

import horovod.tensorflow as hvd
import horovod.tensorflow.keras.elastic as elastic
import keras
import numpy as np
import tensorflow as tf

hvd.init()
inputs = np.random.RandomState(1).randn(512, 8).astype("float32")
targets = inputs.sum(1, keepdims=True)


class Model(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"mse": loss}


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.batches += 1
        if state.batches % 2 == 0:
            print(f"commit {state.batches} size {hvd.size()} loss {logs['mse']:.6f}", flush=True)
            # Rank 0 says so for all.
            state.enough = hvd.broadcast_object(not os.path.exists(os.environ["TEST_GO_ON_WHILE"]), root_rank=0)
            self.model.stop_training = state.enough
        time.sleep(0.1)


entrance = keras.Input((8,))
model = Model(entrance, keras.layers.Dense(1)(keras.layers.Dense(16, "relu")(entrance)))
model.compile(optimizer=keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9), loss="mse")


def shard():
    options = tf.data.Options()
    # An iterator that an exception has taken `fit` from waits for its tuner when Python ends, up to a minute.
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).shard(hvd.size(), hvd.rank())
    return data.repeat().batch(8).with_options(options)


@elastic.run
def train(state):
    callbacks = [
        Watch(),
        elastic.UpdateEpochStateCallback(state),
        elastic.UpdateBatchStateCallback(state),
        elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    if not state.enough:
        model.fit(shard(), steps_per_epoch=20, epochs=10**6 - state.epoch, callbacks=callbacks, verbose=0)


def on_reset():
    state.model.optimizer.lr = 0.01 * hvd.size()


state = elastic.KerasState(model, epoch=0, batch=0, batches=0, enough=False)
state.register_reset_callbacks([on_reset])
train(state)
weight = float(tf.reduce_sum(model.trainable_variables[0]))
print(f"done {state.batches} rank {hvd.rank()} weight {weight:.6f}", flush=True)
